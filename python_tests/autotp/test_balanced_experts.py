"""Unedited models with balanced experts: all-to-all and copies of experts, against themselves in one process."""

import pytest
import torch
import transformers
from autotp.balanced_runs import (
    dropping,
    generated,
    loss_of,
    losses_in_bfloat16,
    on_wires,
    out_of_memory,
    refused,
    saved_and_loaded,
    staged,
    states_shared,
    trained,
    unevenly_split,
)
from autotp.staged import apart
from autotp.zoo import batch

from oases.autotp.balanced import require_balanced
from oases.errors import UsageError

pytestmark = pytest.mark.usefixtures("shared_traces")

CLOSE = 1e-10
SLOW = pytest.mark.slow


def require_close(results, held=None, in_pieces=True, zero=False):
    if zero:
        assert sum(each["states"] for each in results) == results[0]["whole"], "each state is on one rank"
    for result in results:
        assert result["in_pieces"] == in_pieces * result["sub_batches"] * len(result["held"]), "all-to-alls are ops"
        assert result["logits"] <= CLOSE
        assert result["gradients"][0] <= CLOSE, result["gradients"]
        assert result["norm"] <= CLOSE
        assert result["report"]["runs"] == "across layers"
        assert result["held"]
        assert held is None or set(result["held"].values()) == {held}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dims", "options", "placed", "held"),
    [
        ("mixtral", {"tp": 2}, {}, True, 2),
        pytest.param("gpt_oss", {"dp": 2, "tp": 1}, {}, True, 4, marks=SLOW),
        pytest.param("deepseek_v3", {"tp": 2}, {}, True, 4, marks=SLOW),
        pytest.param("deepseek_v3", {"tp": 2}, {"expert_parallel": 1}, False, 8, marks=SLOW),
        pytest.param("qwen3_moe", {"tp": 2}, {}, True, 4, marks=SLOW),
        pytest.param("olmoe", {"tp": 2}, {}, True, 2, marks=SLOW),
        pytest.param("granitemoe", {"tp": 2}, {}, True, 4, marks=SLOW),
        pytest.param("qwen3_moe", {"dp": 2, "tp": 1}, {"zero": True, "expert_parallel": 1}, False, 8, marks=SLOW),
    ],
)
def test_ten_steps_are_those_of_one_process(two_ranks, name, dims, options, placed, held):
    require_close(two_ranks.run(trained, name, dims, options, 10, placed), held, zero="zero" in options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dims", "options", "held"),
    [
        ("mixtral", {"dp": 2, "tp": 2}, {}, 1),
        ("deepseek_v3", {"dp": 2, "tp": 2}, {"expert_parallel": 2, "zero": True}, 4),
        ("gpt_oss", {"dp": 4, "tp": 1}, {"expert_parallel": 2, "zero": True}, 4),
        ("qwen3_moe", {"tp": 4}, {"expert_parallel": 2}, 4),
        ("mixtral", {"dp": 2, "tp": 2}, {"sequence_parallel": True, "recompute": "full"}, 1),
    ],
)
def test_ten_steps_over_four_ranks(four_ranks, name, dims, options, held):
    results = four_ranks.run(trained, name, dims, options, 10, True)
    require_close(results, held, "recompute" not in options, "zero" in options)


MESHES = [  # pp, dp, tp
    ((2, 2, 1), {"expert_parallel": 2}),
    ((2, 1, 2), {}),
    ((2, 2, 1), {"zero": True, "expert_parallel": 1}),
    ((1, 2, 2), {"fsdp": True, "expert_parallel": 2}),
    ((1, 4, 1), {"expert_parallel": 2}),
    ((1, 4, 1), {"fsdp": True, "expert_parallel": 2}),
    ((1, 2, 2), {"fsdp": True}),
    ((1, 2, 2), {"zero": True, "expert_parallel": 1, "recompute": "full"}),
    ((2, 2, 1), {"zero": True, "pipeline": "zb_h1"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        pytest.param(name, *mesh, marks=() if name == "mixtral" and number == 0 else SLOW, id=f"{name}-mesh{number}")
        for name in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
        for number, mesh in enumerate(MESHES)
    ],
)
def test_stages_train_as_one_process(four_ranks, name, shape, options):
    """Losses and norms of ten steps of AdamW; copies of all experts everywhere from the second on."""
    assert apart(four_ranks.run(staged, name, shape, options)) <= CLOSE


SHARDED = {
    "experts of two": ((1, 4, 1), {"fsdp": True, "expert_parallel": 2}),
    "experts of all": ((1, 2, 2), {"zero": True, "expert_parallel": 1}),
    "experts of one": ((1, 2, 2), {"fsdp": True, "expert_parallel": 4}),
}
"""Meshes by the number of ranks that have the same experts, and so share their state."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "number"),
    [
        ("experts of two", "experts of all", 4),
        ("experts of all", "experts of one", 4),
        ("experts of one", "experts of two", 4),
        ("experts of two", "experts of all", 2),
    ],
)
def test_the_state_of_experts_is_sharded_and_goes_on_at_another_mesh(four_ranks, tmp_path, one, other, number):
    """Each rank has a quarter of the state of four experts; of two, which two ranks have each, one of them does."""
    changed = {"num_local_experts": number}
    results = four_ranks.run(states_shared, "mixtral", changed, *SHARDED[one], *SHARDED[other], tmp_path)
    assert sorted(experts for experts, *_ in results) == ([0.25] * 4 if number == 4 else [0.0, 0.0, 0.5, 0.5])
    for _, others, expected, found, _ in results:
        assert others <= 0.55
        assert found == pytest.approx(expected, rel=CLOSE)
    saved, full = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "pretrained"), results[0][-1]
    for key, tensor in saved.state_dict().items():
        assert torch.equal(tensor, full[key]), key


@pytest.mark.slow
def test_experts_are_masters_of_what_is_computed_in_bfloat16(four_ranks):
    ways = [{"fsdp": True, "expert_parallel": degree} for degree in (2, 4)] + [{"zero": True, "expert_parallel": 1}]
    for losses in four_ranks.run(losses_in_bfloat16, "mixtral", (1, 2, 2), ways):
        assert losses[1] == pytest.approx(losses[0], rel=1e-2)
        assert losses[2] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("SwitchTransformersForConditionalGeneration", "decoder.block.1.layer.2.mlp.router"),
        ("NllbMoeForConditionalGeneration", "model.encoder.layers.0.ffn.router"),
    ],
)
def test_routers_that_drop_tokens_are_refused_by_name(kind, where):
    twin = dropping(kind)
    with pytest.raises(UsageError, match=f"{where} of {kind} drops tokens over a capacity"):
        require_balanced(twin, {})


@pytest.mark.parametrize(
    ("name", "options", "changed", "why"),
    [
        ("llama", {}, {}, "LlamaForCausalLM has no expert module"),
        ("phimoe", {}, {}, "PhimoeMultiplier, whose backward is not in a traced graph"),
        ("mixtral", {}, {"num_local_experts": 5}, "2 ranks do not divide its 5 experts; give expert_parallel one of"),
        ("mixtral", {"expert_parallel": 3}, {}, "expert_parallel 3 does not fit 2 ranks"),
        ("mixtral", {"placement": "some"}, {}, "unknown placement 'some'"),
        ("mixtral", {"compile": "inductor"}, {}, "does not run with compile"),
    ],
)
def test_what_cannot_be_balanced_is_refused_by_name(two_ranks, name, options, changed, why):
    for error in two_ranks.run(refused, name, {"tp": 2}, options, changed):
        assert error.startswith("UsageError")
        assert why in error


@pytest.mark.long
def test_experts_that_no_stack_runs_are_sharded_as_other_weights_or_refused(two_ranks):
    options = {"schedule": "layers", "fsdp": True, "expert_parallel": 2, "micro_batches": 2}
    for error in two_ranks.run(refused, "mixtral", {"pp": 1, "dp": 2, "tp": 1}, options, {}):
        assert error.startswith("UsageError: fsdp and zero with stages shard model.layers.0.mlp.experts.")
        assert error.endswith("give expert_parallel=1, or another schedule than 'layers'")


@pytest.mark.slow
def test_tokens_on_a_wire(two_ranks):
    """Tokens are sent in the type of the stack's sums; without tensor parallelism they alone are."""
    for losses, sent in two_ranks.run(on_wires, "mixtral", {"dp": 2, "tp": 1}, (None, "int8")):
        assert 0 < abs(losses[1] / losses[0] - 1) < 0.01
        assert sent[1] < 0.3 * sent[0]


@pytest.mark.slow
def test_batches_that_are_split_differently_raise(two_ranks):
    """One sample in one sub-batch, four in two: layer 1 of a rank meets layer 0 of the other, in eval mode too."""
    for error in two_ranks.run(unevenly_split, "mixtral", (1, 4)):
        assert error.startswith("RoutingError")
        assert "has another layer, forward pass, mode or placement" in error
        assert "give sub_batches=1" in error


@pytest.mark.slow
def test_experts_are_saved_whole_and_loaded_into_another_degree(two_ranks, tmp_path):
    (losses, state), (others, _) = two_ranks.run(saved_and_loaded, "mixtral", {"tp": 2}, {}, tmp_path)
    assert losses == pytest.approx(others)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "pretrained").train()
    assert float(loss_of(model(**batch("mixtral")), batch("mixtral")).detach()) == pytest.approx(losses[0], rel=1e-6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.long
@pytest.mark.parametrize("function", ["oases.autotp.balanced.shard_bounds", "oases.moe.forward.dispatch_plan"])
def test_a_rank_out_of_memory_before_or_after_the_counts_ends_the_run(two_ranks, function):
    for said in two_ranks.run(out_of_memory, "mixtral", {"dp": 1, "tp": 2}, function):
        assert all("rank 1 ran out of memory at model.layers.0.mlp.experts" in each for each in said)


@pytest.mark.long
def test_a_replica_whose_text_has_ended_goes_on_with_the_others(two_ranks):
    """With synced_gpus=True, as the documentation says."""
    for rank, (words, expected) in enumerate(two_ranks.run(generated, "mixtral", {"dp": 2, "tp": 1})):
        assert words.shape == (1, 8 + 3 * rank)
        assert torch.equal(words, expected)
