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


def check(targets, folder, after=False):
    import peft

    plain, data = adapted(targets), batch("llama")
    parallel = oases.parallelize(build("llama") if after else adapted(targets))
    if after:
        parallel(**data).loss.backward()  # as many things may have happened before
        parallel.zero_grad()
        parallel = adapted(targets, parallel)
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
@pytest.mark.parametrize(
    ("targets", "after"),
    [
        pytest.param(
            targets, after, marks=() if after == (targets == "all") else pytest.mark.slow, id=f"{targets}-{when}"
        )
        for targets in TARGETS
        for after, when in ((False, "before parallelize"), (True, "after it"))
    ],
)
def test_adapters_are_cut_as_the_linears_that_they_are_added_to(two_ranks, targets, after, tmp_path):
    two_ranks.run(check, targets, str(tmp_path / "adapter"), after)


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


def check_states(state, after, options):
    """Loss and gradients in a state of the adapters, and the loss once more as before, where peft goes back to it."""
    plain, data = two_adapters(), batch("llama")
    parallel = two_adapters(oases.parallelize(build("llama"), **options)) if after else two_adapters()
    parallel = parallel if after else oases.parallelize(parallel, **options)
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
    "across layers": (False, {}),
    "inside layers": (False, {"schedule": "layers"}),
    "added after parallelize": (True, {}),
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
    two_ranks.run(check_states, state, *WAYS[way])


def off_while_merged():
    model = oases.parallelize(adapted("some"))
    model.merge_adapter()
    with model.disable_adapter():  # peft takes them out of the weights again in the forward
        return said(lambda: model(**batch("llama")))


@pytest.mark.long
def test_a_state_that_a_graph_cannot_follow(two_ranks):
    for text in two_ranks.run(off_while_merged):
        assert re.search(r"another _disable_adapters, merged_adapters than at .*unmerge_adapter\(\)", text), text


def dropped(alone):
    """Loss in training with dropout before the adapters."""
    model = adapted("all", lora_dropout=0.3)
    mesh = dist.new_group([dist.get_rank()], use_local_synchronization=True) if alone else None
    return float(oases.parallelize(model.train(), mesh=mesh)(**batch("llama")).loss.detach())


@pytest.mark.slow
def test_dropout_of_adapters_does_not_depend_on_the_degree(two_ranks):
    assert two_ranks.run(dropped, False) == [pytest.approx(two_ranks.run(dropped, True)[0], rel=1e-5)] * 2


def check_fused():
    """Queries, keys and values in one matrix, whose shards peft would take for the whole."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    plain, parallel, data = build("gpt2").double(), oases.parallelize(build("gpt2").double()), batch("gpt2")
    for model in (plain, parallel):
        torch.manual_seed(2)
        peft.get_peft_model(model, config)
        model(**data).loss.backward()
    assert [each.runs for each in parallel.oases_partition.layers] == [ACROSS]
    worst, name = gradients_apart(plain, parallel)
    assert worst < 1e-6, (worst, name)  # the loss is in single precision


@pytest.mark.slow
def test_adapters_of_fused_linears_after_parallelize(two_ranks):
    two_ranks.run(check_fused)


def refused(seeds, options):
    """Error of an adapter that is added to a parallelized model."""
    import peft

    model = oases.parallelize(build("llama"))
    torch.manual_seed(dist.get_rank() if seeds else 0)
    return said(lambda: peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"]} | options)))


REFUSED = {
    "DoRA": ({"use_dora": True}, r"by LoraConfig\(use_dora=True\), .*whole weights; add adapters before"),
    "the head": ({"target_modules": ["lm_head"]}, "lm_head, which holds rows of the vocabulary; add adapters before"),
    "other values on each rank": ({}, "is not the same on all ranks: .*lora_A.* torch.manual_seed"),
}


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("what", REFUSED)
def test_adapters_that_are_refused_after_parallelize(two_ranks, what):
    options, expected = REFUSED[what]
    for text in two_ranks.run(refused, not options, options):
        assert re.search(expected, text), text
