"""Every kind of plan that is found for a traced model: the fields it sets, and that parallelize() takes it."""

import functools
import json
import os
from dataclasses import replace

import pytest
import torch
from planner.plan_kinds import KINDS, ONE, PIPELINES, plans_of

from benchmarks.sweep import Problem
from oases.autotp.costs import trace_layers
from oases.autotp.pipeline.building import require_runnable
from oases.core.schedule import generate
from oases.errors import UsageError
from oases.planner import Predictor, Space, rank_plans
from oases.planner.memory import sharding_bytes, stage_parameters, stage_state_bytes
from oases.planner.space import Setting
from oases.plans.check import check
from oases.plans.gpt import gpt
from oases.plans.pipelines import chunks_of
from oases.plans.plan import Plan
from oases.simulator.cluster import cluster_called, described, with_link
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import MeasuredBlock, stack_costs

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

S = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 160}
MODELS = {
    "llama": ("LlamaForCausalLM", {**S, "num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 96}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    ),
    "olmoe": ("OlmoeForCausalLM", {**S, "num_experts": 4, "num_experts_per_tok": 2}),
}


@functools.cache
def model(name):
    kind, sizes = MODELS[name]
    kind = getattr(transformers, kind)
    with torch.device("meta"):
        return trace_layers(kind(kind.config_class(**sizes)), sequence=16)


@pytest.mark.few(16)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_plan_sets_its_fields(name, kind):
    options, fields = KINDS[kind]
    hardware, world = cluster_called("4x3090")
    if kind.startswith("experts") and name != "olmoe":
        (degree,) = options["expert_parallel"]
        with pytest.raises(UsageError, match=f"expert_parallel {degree} must divide 4 ranks and the 0 experts of"):
            rank_plans(model(name), hardware, world, 16, space=Space(**options))
        return
    plans = plans_of(rank_plans(model(name), hardware, world, 16, space=Space(**options)), kind)
    if kind in ("interleaved", "zb_v") and name == "t5":  # its layers are of four kinds
        assert not plans
        return
    if kind == "sequence-parallel" and name == "olmoe":  # a norm over all heads keeps its attention whole
        assert not plans
        return
    best = plans[0]
    if kind in PIPELINES:
        assert best.pipeline == kind
        assert len(best.parts) == 2 * chunks_of(kind)
    found = {
        "tp": best.uniform_tp, "stages": len(best.stages), "micro_batches": best.micro_batches, "zero": best.zero,
        "fsdp": best.fsdp, "wire": best.wire, "experts": best.model.expert_parallel,
    }  # fmt: skip
    assert {name: found[name] for name in fields} == fields
    along = {segment.sequence_parallel for stage in best.stages for segment in stage.segments}
    assert along == {kind == "sequence-parallel"}
    assert [layer for part in best.parts for layer in best.layers_of(part)] == list(range(best.model.layers))
    check(best)
    require_runnable(best)
    assert Plan.from_json(best.to_json()) == best


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_memory_decides_what_is_recomputed(name):
    hardware, world = cluster_called("4x3090")
    space = Space(degrees=(1,), zero=(False,), fsdp=(False,), max_stages=2, micro_batches=(4,))
    free = rank_plans(model(name), hardware, world, 16, space=space)[0]
    budget = int(0.9 * max(free.prediction.memory_bytes))
    tight = rank_plans(model(name), hardware, world, 16, budget=budget, space=space)[0]
    assert max(tight.prediction.memory_bytes) <= budget
    assert tight != free


def test_degrees_that_were_measured_are_searched():
    shape = {**S, "num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 192, "num_key_value_heads": 6}
    with torch.device("meta"):
        six = trace_layers(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)), sequence=16)
    hardware, world = cluster_called("6x3090")
    options = Space(**ONE)
    assert rank_plans(six, hardware, world, 12, space=options)[0].uniform_tp in (1, 2)
    times = BlockTimes(*[1e-4] * 8)
    blocks = tuple(
        MeasuredBlock(six.block_name(kind), six.hidden, six.heads, 16, "float32", 3, 1.0, times)
        for kinds in six.layer_kinds
        for kind in kinds
    )
    measured = replace(hardware, blocks=blocks)
    assert {plan.uniform_tp for plan in rank_plans(six, measured, world, 12, space=options)} == {3}
    assert Problem(six, measured, world, 12).degrees == (3,)
    with pytest.raises(UsageError, match="powers of two are searched unless others are named or measured"):
        rank_plans(six, hardware, 3, 1, space=Space(**ONE | {"micro_batches": (1,)}))


def test_layers_do_not_split_and_degrees_do_not_mix():
    best = rank_plans(model("t5"), *cluster_called("4x3090"), 16, space=Space(**ONE | {"degrees": (2,)}))[0]
    text = best.to_json()
    assert best.model.num_blocks == 10, "two blocks in a layer of the encoder, three in one of the decoder"
    older = json.loads(text)
    assert older["model"].pop("token_wise")
    assert older["model"].pop("expert_parallel") == 0
    older["model"]["kinds"][0]["blocks"][0]["shares"][0].pop("routed")
    assert not Plan.from_json(json.dumps(older)).model.token_wise, "written before it was searched"
    with pytest.raises(UsageError, match="recomputed_layers must be from 0 to the 4 layers"):
        Plan.from_json(text.replace('"recomputed_layers": 0', '"recomputed_layers": 5'))
    with pytest.raises(UsageError, match="unknown wire 'int4'; known are none, bfloat16, float16, int8: plan again"):
        Plan.from_json(text.replace('"wire": "none"', '"wire": "int4"'))


GPT = gpt(1024, 4, 16, 512, 4096)


def first(**options):
    hardware, world = cluster_called("4x3090")
    space = Space(**{**ONE, "degrees": (2,), "sequence_parallel": (False,), **options})
    return rank_plans(GPT, hardware, world, 16, space=space)


def test_wire_types_are_priced_by_their_bytes():
    whole, half = (first(wire=(wire,), schedules=("sync",))[0].prediction for wire in ("none", "bfloat16"))
    assert 0.4 * whole.exposed_seconds < half.exposed_seconds < 0.7 * whole.exposed_seconds
    byte = first(wire=("int8",), schedules=("sync",))[0].prediction
    assert byte.exposed_seconds < half.exposed_seconds


def test_fsdp_saves_weights_and_pays_for_gathers():
    plain, sharded = (
        next(each for each in first(zero=(False,), fsdp=(fsdp,)) if each.fsdp == fsdp) for fsdp in (False, True)
    )
    assert sharded.fsdp
    assert sharded.prediction.step_seconds > plain.prediction.step_seconds
    assert sharded.prediction.memory_bytes < plain.prediction.memory_bytes
    predictor = Predictor(cluster_called("4x3090")[0])
    names = [each.name for rank in predictor.program(sharded).ranks for each in rank if hasattr(each, "name")]
    gathers = [name for name in names if "weights of block" in name and "copy" not in name]
    assert sum("forward" in name for name in gathers) == 2 * GPT.num_blocks


def test_sequence_parallelism_of_built_in_models_is_searched():
    found = first(sequence_parallel=(True,))[0]
    assert all(segment.sequence_parallel for stage in found.stages for segment in stage.segments)


def test_up_to_eight_devices_are_a_node():
    hardware, world = cluster_called("8x4090")
    assert described(hardware, world).startswith("8 x RTX 4090 (24 GiB): 1 node of 8, ")
    assert hardware.link_of(8) == "node"
    hardware, world = cluster_called("16x4090", 8)
    changed = with_link(hardware, world, "25gbit")
    assert changed.cluster.bytes_per_second == 25e9 / 8
    assert changed.node == hardware.node
    assert described(changed, world).endswith("25 Gbit/s between nodes")
    both = with_link(hardware, world, "node=20GB/s,cluster=10gbit")
    assert (both.node.bytes_per_second, both.cluster.bytes_per_second) == (20e9, 1.25e9)
    with pytest.raises(UsageError, match="link 'fast' is not a rate"):
        with_link(hardware, world, "fast")


def experts_over(degree, tp, cluster="2x8x3090", world_batch=16, **more):
    """The best plan of 64 experts of OLMoE at these degrees, in one stage."""
    options = {**ONE, "degrees": (tp,), "expert_parallel": (degree,), **more}
    hardware, world = cluster_called(cluster)
    return rank_plans(many_experts(), hardware, world, world_batch, space=Space(**options))[0]


@functools.cache
def many_experts():
    sizes = {**S, "hidden_size": 256, "intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8}
    with torch.device("meta"):
        return trace_layers(transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes)), sequence=64)


@pytest.mark.long
def test_experts_over_more_ranks_take_less_memory_and_all_to_alls():
    summed, spread = experts_over(0, 2), experts_over(8, 2)
    shape = many_experts()
    (kind,) = {
        kind for kinds in shape.layer_kinds for kind in kinds if shape.with_expert_parallel(8).expert_parameters(kind)
    }
    experts = sum(s.parameters for s in shape.block(kind).shares if s.routed)
    assert experts == 64 * 3 * 256 * 512
    assert spread.model.expert_parameters(kind) == experts // 8
    saved = summed.prediction.memory_bytes[0] - spread.prediction.memory_bytes[0]
    spared = shape.layers * (experts // 2 - experts // 8)
    assert 16 * spared < saved < 1.05 * 20 * spared, "weights, gradients, moments, and the buckets of gradients"
    # A token is sent to its eight experts, and every rank of two sends half of its replica's tokens.
    assert shape.with_expert_parallel(8).routed_bytes(kind, 2, 1) == 64 * 8 * 256 * 4 / 2


@pytest.mark.long
def test_tokens_stay_inside_a_node_where_the_experts_do():
    hardware, _ = cluster_called("2x8x3090")
    schedule = generate("oases", 1, 2)
    for degree, link, sharing in ((8, hardware.node, 1), (16, hardware.cluster, 1)):
        spread = many_experts().with_expert_parallel(degree)
        kinds = spread.layer_kinds[0]
        costs = stack_costs(hardware, spread, kinds, 2, 4, schedule)
        sent = spread.routed_bytes(kinds[0], 2, 2)
        assert costs.exchanges == (link.seconds("all_to_all", degree, sent, sharing),)
        assert costs.exchanges[0] > 0
        assert costs.link == "node"
        assert costs.exchange_link == (("cluster", link.contention) if degree == 16 else None)


@pytest.mark.long
@pytest.mark.parametrize("degree", [8, 16])
def test_the_state_of_experts_is_shared_by_the_ranks_that_have_them(degree):
    """Dense weights of two ranks by eight replicas, experts by 16 / degree: by none where each rank has others."""
    whole, zero, fsdp = (
        experts_over(degree, 2, zero=(way == "zero",), fsdp=(way == "fsdp",)) for way in ("", "zero", "fsdp")
    )
    for plan in (zero, fsdp):
        assert check(Plan.from_json(plan.to_json())) is None
        (dense, replicas), (experts, alike), (ends, _) = stage_parameters(plan, 0)
        assert (replicas, alike) == (8, 16 // degree)
        assert experts == plan.model.layers * 64 * 3 * 256 * 512 // degree
        shared = 16 * (dense // 8 + ends // 8) + 16 * experts // alike
        shared += 4 * (dense + ends + experts * (alike > 1)) if plan.zero else 0  # ZeRO keeps whole weights besides
        while_whole = sharding_bytes(plan.model, 2, ends, fsdp=plan.fsdp)
        assert stage_state_bytes(plan, 0) - while_whole == pytest.approx(shared, rel=1e-6)
    assert stage_state_bytes(whole, 0) == 16 * (dense + experts + ends)
    names = [
        each.name
        for rank in Predictor(cluster_called("2x8x3090")[0]).program(fsdp).ranks
        for each in rank
        if hasattr(each, "name")
    ]
    gathers = [name for name in names if "experts of block" in name]
    assert len(gathers) == (0 if degree == 16 else 6 * fsdp.model.layers), "forward and backward: start, wait, copy"


def test_sharded_experts_are_searched_where_every_rank_has_some():
    """64 experts over 8 ranks: 8 on each, which 16 ranks would share."""
    shape, (hardware, world) = many_experts().with_expert_parallel(8), cluster_called("16x8x3090")
    whole, zero = (
        Setting(world, 128, 1, 1, zero).degrees(shape, hardware, Space(degrees=(2,))) for zero in (False, True)
    )
    assert (whole, zero) == ([2], [])


def test_a_plan_of_experts_is_checked():
    best = experts_over(8, 2)
    assert best.text().endswith("experts over 8 ranks")
    with pytest.raises(UsageError, match="expert_parallel 3 does not divide 64 experts"):
        Plan.from_json(best.to_json().replace('"expert_parallel": 8', '"expert_parallel": 3'))
    with pytest.raises(
        UsageError, match="expert_parallel 32 must divide a stage's 16 ranks and be a multiple of tp 2"
    ):
        check(Plan.from_json(best.to_json().replace('"expert_parallel": 8', '"expert_parallel": 32')))
    with pytest.raises(UsageError, match="expert_parallel must be whole numbers of at least 0"):
        Space(expert_parallel=(-1,))
    free = rank_plans(many_experts(), *cluster_called("2x8x3090"), 16, space=Space(**ONE | {"zero": (False,)}))
    assert {plan.model.expert_parallel for plan in free} > {0, 8}, "searched unless a space says otherwise"
