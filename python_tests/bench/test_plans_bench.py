"""The benchmark of plans: what is scaled and what stays, its rows, bad input. Times say nothing here."""

import json
import os
from dataclasses import replace

import pytest
import torch
from autotp.comparison import said

from oases.autotp import parallelize
from oases.autotp.configuration import configured_model
from oases.autotp.costs import trace_layers
from oases.errors import UsageError
from oases.planner import Plan, Segment, Stage
from oases.simulator.cluster import cluster_called
from oases_bench.harness import Ranks
from oases_bench.plans import PlansBenchConfig, run_plans_bench, shown
from oases_bench.scaled_plans import (
    emulate_compute,
    emulated_hardware,
    scaled_configuration,
    scaled_layers,
    scaled_plan,
)

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 256, "d_kv": 32, "d_ff": 512,
    "num_layers": 4, "num_decoder_layers": 8, "num_heads": 8, "vocab_size": 2048, "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return PlansBenchConfig(
        models=str(path), cluster="2x4090", kinds="pp", global_batch=4, dtype="float32", width=64, layers=1,
        sequence=8, samples=1, iterations=1,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("flops", [0.0, 1e10])
def test_a_cell_has_its_row(two_ranks, config, flops):
    result = two_ranks.run(run_plans_bench, replace(config, flops=flops), Ranks(2), False)[0]
    row = result["cells"]["llama pp"]
    assert row["predicted_seconds"] > 0
    assert row["step_seconds"] > 0
    assert "stages 0-1: 1 layers tp 1 x dp 1" in row["plan"]
    kinds = [name.split()[1].strip(",") for name, *_ in row["blocks"]]
    assert set(kinds) == ({"block", "head"} if flops else {"block", "embedding", "head"})
    assert "median error" in list(shown(result))[1]


def test_sizes_shrink_and_shapes_stay():
    small = scaled_configuration(LLAMA, 64, 4, 2)
    assert [small[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")] == [64, 2, 2]
    assert (small["num_hidden_layers"], small["intermediate_size"], small["vocab_size"]) == (4, 128, 512)
    both = scaled_configuration(T5, 64, 6, 1)
    assert (both["num_layers"], both["num_decoder_layers"], both["d_model"]) == (2, 4, 64)
    with pytest.raises(UsageError, match="gives none of num_attention_heads"):
        scaled_configuration({"model_type": "llama"}, 64, 4, 1)


@pytest.mark.long
def test_a_scaled_plan_has_the_stages_of_the_large_one():
    large, small = (trace_layers(configured_model(LLAMA | {"num_hidden_layers": n}), sequence=8) for n in (8, 3))
    stages = (Stage((Segment(12, 2, "oases", 2, 2),)), Stage((Segment(4, 2, "oases", 2, 2),)))
    plan = Plan(large, 4, 4, 64, 4, stages, zero=False, pipeline="zb_h1")
    counts = scaled_layers(plan, 2)
    assert counts == [2, 1]
    found = scaled_plan(plan, small, counts, 5)
    assert [each.segments[0].num_blocks for each in found.stages] == [4, 2]
    assert [each.segments[0].recomputed_layers for each in found.stages] == [1, 1]
    assert (found.micro_batches, found.pipeline, found.samples(2), found.global_batch) == (4, "zb_h1", 4, 16)


OLMOE = {
    "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_size": 64, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def blocks_run(data, flops):
    """Blocks of each layer as it runs, and the error of an emulation by costs of layers with twice as many."""
    torch.manual_seed(0)  # another test may have left the ranks of the pool with other states
    model, layered = (
        parallelize(configured_model(data, device="cpu")),
        trace_layers(configured_model(data), sequence=8),
    )
    doubled = replace(layered, kinds=tuple(replace(kind, blocks=kind.blocks * 2) for kind in layered.kinds))
    hardware = emulated_hardware(cluster_called("2x4090")[0], doubled, (2,), flops)
    (found,) = model.oases_partition.layers
    return [found.runner.layer_of.count(n) for n in range(2)], said(
        lambda: emulate_compute(model, doubled, hardware, 2)
    )


@pytest.mark.long
@pytest.mark.parametrize("data", [OLMOE, {**LLAMA, "num_hidden_layers": 2}])
def test_layers_run_as_the_blocks_that_they_are_planned_as(two_ranks, data):
    layered = trace_layers(configured_model(data), sequence=8)
    planned = [len(layered.kinds[kind].blocks) for kind in layered.order]
    for blocks, other in two_ranks.run(blocks_run, data, 1e10):
        assert blocks == planned
        assert f"model.layers.0: it runs as {blocks[0]} blocks and was planned as {2 * blocks[0]}" in other


@pytest.mark.long
def test_an_emulated_device_has_the_times_of_its_rate():
    model = trace_layers(configured_model(LLAMA), sequence=8)
    hardware = emulated_hardware(cluster_called("2x4090")[0], model, (2,), 1e9)
    kind = model.kind_of(1)
    assert hardware.block_times(model, kind, 2, 4).forward >= sum(model.matmul_flops(kind, 2, 4)) / 1e9
    forward, backward = hardware.end_times(model, model.layers, 2, 4)
    assert (forward, backward) == pytest.approx((model.head_flops(4, 2) / 1e9, 2 * model.head_flops(4, 2) / 1e9))


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"models": ""}, 2, "--models names no config.json"),
        ({"models": "nosuch.json"}, 2, "--models: 'nosuch.json' is not a file"),
        ({"kinds": "nosuch"}, 2, "--kinds 'nosuch' is unknown"),
        ({"cluster": "4x4090"}, 2, "has 4 ranks, and --tp asks for 2"),
        ({"cluster": "64x4090", "flops": 0.0}, 64, "cannot compute at once"),
        ({"width": 0}, 2, "--width must be at least 1"),
    ],
)
def test_bad_values_are_named(config, changes, ranks, message):
    with pytest.raises(UsageError, match=message):
        replace(config, **changes).check(ranks, 1)
