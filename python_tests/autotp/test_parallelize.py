"""`parallelize` as a whole: weights in and out, plans, meshes, what it says and what it refuses."""

import pytest
import torch
import torch.distributed as dist
import transformers
from autotp.zoo import batch, build
from autotp.zoo_runs import one_step

import oases
import oases.errors
from oases.plans.gpt import gpt
from oases.plans.plan import Experts, Plan, Segment, Stage
from oases.profile.memory import measure_memory

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.slow), "bert"])
def test_pretrained_weights_are_cut_and_come_back(two_ranks, tmp_path, name):
    model = build(name)
    model.save_pretrained(tmp_path / "one")
    expected = float(model(**batch(name)).loss.detach())
    whole = sum(p.numel() for p in model.parameters())
    for loss, held in two_ranks.run(one_step, name, tmp_path / "one", tmp_path / "two"):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert held < 0.8 * whole
    again = type(model).from_pretrained(tmp_path / "two")
    for (first, mine), (second, theirs) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert first == second
        assert torch.equal(mine, theirs)
    assert isinstance(again, transformers.PreTrainedModel)


def layers_computed_again(name, recompute):
    model = build(name)
    group = dist.group.WORLD
    oases.parallelize(model, mesh=group, recompute=recompute)
    found = []
    for each in model.oases_partition.layers:
        stack = each.runner.stack
        found.append(sorted({stack.layer_of[block] for block in stack.schedule.recomputed_blocks}))
    return found


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "stacks"), [("gptj", 1), ("llama", 1), ("bart", 2)])
def test_recompute_counts_the_layers_of_the_model(two_ranks, name, stacks):
    """Layers of one block, of two, and of three in a decoder."""
    for again in two_ranks.run(layers_computed_again, name, 1):
        assert again == [[0]] * stacks


def kept_by(model, x):
    return measure_memory(lambda: model(x).last_hidden_state, lambda out: out.sum().backward(), x.device).kept


@pytest.mark.long
def test_nothing_is_kept_that_the_author_s_layers_do_not_keep():
    """On one rank, where nothing is cut, graphs keep what autograd keeps of the same ops run one by one."""
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=160, vocab_size=90)
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes))
    x = torch.randint(0, 90, (4, 32))
    alone = kept_by(model, x)
    oases.parallelize(model, mesh=None, sub_batches=2)
    for _ in range(2):  # what the first call makes for the later ones is no part of a step
        kept = kept_by(model, x)
    assert kept <= 1.01 * alone


def moved_without_weights():
    model = oases.parallelize(build("llama"), device="meta")
    return [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if not tensor.is_meta]


@pytest.mark.long
def test_a_model_without_weights_to_read_is_moved_to_the_device(two_ranks):
    assert two_ranks.run(moved_without_weights) == [[], []]


def saved_by_its_own_method(folder):
    model = oases.parallelize(build("llama"))
    with pytest.raises(oases.errors.UsageError, match="does not take push_to_hub"):
        model.save_pretrained(folder, push_to_hub=True)
    model.save_pretrained(folder)


@pytest.mark.long
def test_a_models_own_way_to_save_writes_the_whole_model(two_ranks, tmp_path):
    two_ranks.run(saved_by_its_own_method, tmp_path / "saved")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    for name, mine in build("llama").state_dict().items():
        assert torch.equal(mine, again.state_dict()[name])


def as_planned(layers):
    shape = gpt(hidden=32, layers=layers, heads=4, sequence=10, vocabulary=90)
    segment = Segment(2 * layers, 2, "cross_pass", 2, 1)
    plan = Plan(shape, 2, 2, 4, 1, (Stage((segment,)),))
    model = oases.parallelize(build("llama"), plan=plan)
    model(**batch("llama")).loss.backward()
    return model.oases_partition.layers[0].schedule


@pytest.mark.long
def test_a_plan_says_schedule_and_recomputation(two_ranks):
    assert two_ranks.run(as_planned, 2) == ["cross_pass"] * 2
    with pytest.raises(RuntimeError, match="plan: it is for 3 layers, the model has 2 in lists"):
        two_ranks.run(as_planned, 3)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"experts": Experts(4)}, "does not do experts 4 .*leave them out"),
        ({"degrees": (1, 2)}, r"segments have the tensor-parallel degrees \[1, 2\]"),
        ({"blocks": (1, 3)}, "does not do num_blocks 1 for such a model; give segments of whole layers"),
        ({"world": 4}, "it is for 4 ranks, the run has 1"),
        ({"fsdp": True, "world": 4}, "it is for 4 ranks, the run has 1"),
    ],
)
def test_what_a_plan_says_and_nobody_would_do_is_refused(changes, told):
    values = {"model": gpt(hidden=32, layers=2, heads=4, sequence=10, vocabulary=90), "world": 2} | changes
    degrees, blocks = values.pop("degrees", (2, 2)), values.pop("blocks", (2, 2))
    segments = tuple(Segment(many, tp, "sync", 1) for many, tp in zip(blocks, degrees, strict=True))
    plan = Plan(**{"ranks_per_node": 2, "global_batch": 8, "micro_batches": 1, **values}, stages=(Stage(segments),))
    with pytest.raises(oases.errors.UsageError, match=told):
        oases.parallelize(build("llama"), plan=plan)


@pytest.mark.long
def test_one_process_runs_as_before():
    for options in ({}, {"schedule": "layers"}):
        model, parallel = build("gpt2"), oases.parallelize(build("gpt2"), **options)
        expected, got = model(**batch("gpt2")), parallel(**batch("gpt2"))
        torch.testing.assert_close(got.loss, expected.loss)
        got.loss.backward()
        expected.loss.backward()
        for mine, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_options_that_stacks_of_unedited_models_do_not_have():
    with pytest.raises(oases.errors.UsageError, match="does not take layer_of; options of its stacks are"):
        oases.parallelize(build("gpt2"), layer_of=(0, 0))
