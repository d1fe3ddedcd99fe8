"""Models with adapters of peft (LoRA), parallelized on two ranks, against themselves in one process."""

import contextlib
import re
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from autotp.comparison import ACROSS, gradients_apart, said
from autotp.zoo import batch, build

import oases
from oases.core.blocks.sharding import cuts

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

TARGETS = {"all": "all-linear", "queries and values": ["q_proj", "v_proj"]}
SOME = ["q_proj", "down_proj"]
"""Linears of which one is column-parallel and one row-parallel."""


def adapted(targets, model=None, name="llama", **options):
    """Model with LoRA pairs of which the second, which is zero at first, has values, too."""
    import peft  # takes seconds

    model = build(name) if model is None else model
    torch.manual_seed(2)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS.get(targets, SOME), **options))
    fill(model, "lora_B")
    return model


def fill(model, part):
    """Give adapters values, of which each rank has its shards."""
    torch.manual_seed(2)
    known = cuts(model)
    for name, parameter in model.named_parameters():
        if part in name:
            cut = known.get(id(parameter))
            whole = torch.randn([cut.size if cut and at == cut.dim else n for at, n in enumerate(parameter.shape)])
            parameter.detach().copy_(0.1 * (whole if cut is None else cut.take(whole, dist.get_rank(), 2)))


def check(targets, folder):
    import peft

    plain, data = adapted(targets), batch("llama")
    parallel = oases.parallelize(adapted(targets))
    (layers,) = parallel.oases_partition.layers
    assert layers.runs == ACROSS, layers
    expected, got = plain(**data).loss, parallel(**data).loss
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    expected.backward()
    got.backward()
    worst, name = gradients_apart(plain, parallel)
    assert worst < 1e-4, name
    parallel.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(build("llama"), folder)
    torch.testing.assert_close(loaded(**data).loss, expected, rtol=1e-6, atol=0)
    for parameter in parallel.parameters():  # peft loads full tensors, of which the ranks keep their shards
        if parameter.requires_grad:
            parameter.detach().zero_()
    parallel.load_adapter(folder, "default")
    torch.testing.assert_close(parallel(**data).loss, expected, rtol=1e-5, atol=0)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_are_cut_as_the_linears_that_they_are_added_to(two_ranks, targets, tmp_path):
    two_ranks.run(check, targets, str(tmp_path / "adapter"))


def two_adapters(model=None):
    """Model of which all weights are trained, with two adapters; the second one, of some linears, is inactive."""
    import peft

    model = adapted("some", model)
    torch.manual_seed(3)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj", "down_proj"]))
    fill(model, "other")
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model


def disabled(model):
    return model.disable_adapter()


def replaced(model):
    model.set_adapter("other")
    return contextlib.nullcontext()


def rescaled(model):
    for part in model.modules():
        if hasattr(part, "set_scale"):
            part.set_scale("default", 3.0)
    return contextlib.nullcontext()


def merged(model):
    model.merge_adapter()
    return contextlib.nullcontext()


STATES = (disabled, replaced, rescaled, merged)


def check_states(state, options):
    """Loss and gradients in a state of the adapters, and the loss once more as before, where peft goes back to it."""
    plain, data = two_adapters(), batch("llama")
    parallel = oases.parallelize(two_adapters(), **options)
    with torch.no_grad():
        before = parallel(**data).loss
    found = []
    with state(plain), state(parallel):
        for model in (plain, parallel):
            for parameter in model.parameters():  # peft freezes adapters that are off
                parameter.requires_grad_()
            found.append(model(**data).loss)
            found[-1].backward()
    expected, got = (loss.detach() for loss in found)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    assert torch.allclose(expected, before, rtol=1e-4) == (state is merged)
    worst, name = gradients_apart(plain, parallel)
    assert worst < 1e-4, name
    losses = [model(**data).loss.detach() for model in (plain, parallel)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


WAYS = {
    "across layers": {},
    "inside layers": {"schedule": "layers"},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("state", "way"),
    [
        pytest.param(state, way, marks=() if (state, way) == (disabled, "across layers") else pytest.mark.slow)
        for state in STATES
        for way in WAYS
    ],
)
def test_adapters_are_off_replaced_scaled_and_merged(two_ranks, state, way):
    two_ranks.run(check_states, state, WAYS[way])


def off_while_merged():
    model = oases.parallelize(adapted("some"))
    model.merge_adapter()
    with model.disable_adapter():  # peft takes them out of the weights again in the forward
        return said(lambda: model(**batch("llama")))


@pytest.mark.long
def test_a_state_that_a_graph_cannot_follow(two_ranks):
    for text in two_ranks.run(off_while_merged):
        assert re.search(r"another .*_disable_adapters,.* merged_adapters.* than at .*unmerge_", text), text


def dropped(alone):
    """Loss in training with dropout before the adapters."""
    model = adapted("all", lora_dropout=0.3)
    mesh = dist.new_group([dist.get_rank()], use_local_synchronization=True) if alone else None
    return float(oases.parallelize(model.train(), mesh=mesh)(**batch("llama")).loss.detach())


@pytest.mark.slow
def test_dropout_of_adapters_does_not_depend_on_the_degree(two_ranks):
    assert two_ranks.run(dropped, False) == [pytest.approx(two_ranks.run(dropped, True)[0], rel=1e-5)] * 2


def refused(part):
    """Error of a model whose layers, or head, got an adapter after it was parallelized."""
    import peft

    def called():
        model = oases.parallelize(build("llama"))
        peft.get_peft_model(model, peft.LoraConfig(target_modules=[part]))(**batch("llama"))

    return said(called)


def test_adapters_of_stacked_experts_are_refused_by_name():
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    model = peft.get_peft_model(build("mixtral"), config)
    with pytest.raises(oases.UsageError, match=r"'down_proj', named in target_parameters .* in target_modules"):
        oases.parallelize(model)


@pytest.mark.long
@pytest.mark.parametrize("part", ["q_proj", "lm_head"])
def test_adapters_after_parallelize_are_refused(two_ranks, part):
    for text in two_ranks.run(refused, part):
        assert re.search(
            r"came after parallelize\(\).*get_peft_model\(model, config\), then oases\.parallelize", text
        ), text
