"""Memory of ranks that share state (ZeRO, FSDP) beside what a plan predicts: bytes of live tensors at the peak."""

import gc
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import oases
from oases.autotp.costs import trace_configuration
from oases.planner import Plan, Predictor, Segment, Stage
from oases.profile.memory import measure_memory
from oases.simulator.cluster import cluster_called
from oases.testing import RankPool

SEQUENCE, MICRO_BATCHES, SAMPLES = 8, 4, 2
"""Tokens per sample; micro-batches per step; samples of a replica per micro-batch."""
WAYS = {"none": {}, "zero": {"zero": True}, "fsdp": {"fsdp": True}}


def config_of(layers, width):
    return LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def live_bytes():
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter, DTensor):
            held = each.to_local() if type(each) is DTensor else each
            if not held.is_meta and not held.is_sparse and type(held) in (torch.Tensor, torch.nn.Parameter):
                storages[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    return sum(storages.values())


def measured(shape, way, dtype, layers, width):
    """Stage of this rank, bytes at the peak of a step with clipping and the optimizer, and bytes between steps."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    before = live_bytes()
    torch.manual_seed(0)
    model = oases.parallelize(
        LlamaForCausalLM(config_of(layers, width)), mesh=mesh, micro_batches=MICRO_BATCHES,
        dtype=getattr(torch, dtype), **WAYS[way],
    )  # fmt: skip
    optimizer = oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3)
    tokens = torch.randint(256, (MICRO_BATCHES * SAMPLES, SEQUENCE))

    def step():
        loss = model.train_step(input_ids=tokens, labels=tokens)
        oases.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(2):
        step()
    held = live_bytes() - before
    peak = held + measure_memory(step, lambda _: None, torch.device("cpu")).peak
    parameters = sum(each.numel() for each in model.parameters())  # of full tensors, where they are sharded
    model.oases_pipeline.close()
    return mesh.get_local_rank("pp"), peak, held, parameters


def predicted(shape, way, dtype, layers, width):
    """Bytes at the peak, by stage."""
    stages, data, tensor = shape
    model = trace_configuration(config_of(layers, width), sequence=SEQUENCE, dtype=dtype)
    hardware, world = cluster_called(f"{math.prod(shape)}x3090")
    blocks = model.num_blocks // stages
    plan = Plan(
        model, world, world, MICRO_BATCHES * SAMPLES * data, MICRO_BATCHES,
        tuple(Stage((Segment(blocks, tensor, "oases", 2, 0),)) for _ in range(stages)), **WAYS[way],
    )  # fmt: skip
    predictor = Predictor(hardware)
    return [predictor.peak_bytes(plan, number) for number in range(stages)]


def compare(pool, *case):
    """Measured over predicted peak, by stage; printed with the bytes per parameter."""
    found, expected = pool.run(measured, *case), predicted(*case)
    errors = []
    for stage, bytes_predicted in enumerate(expected):
        rows = [row for row in found if row[0] == stage]
        peak, held, parameters = (max(row[at] for row in rows) for at in (1, 2, 3))
        errors.append(bytes_predicted / peak - 1)
        shape, way, dtype, layers, width = case
        print(
            f"| {shape} | {layers} x {width} | {dtype} | {way} | {stage} | {parameters:,} | {peak / 2**20:.2f} | "
            f"{bytes_predicted / 2**20:.2f} | {errors[-1]:+.1%} | {held / parameters:.2f} |"
        )
    return errors


@pytest.fixture(scope="module")
def new_ranks():
    """Ranks that hold nothing of other tests, which might be freed meanwhile."""
    with RankPool(2) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("zero", "bfloat16"),
        ("fsdp", "bfloat16"),
        ("fsdp", "float32"),
    ],
)
def test_replicas_hold_what_a_plan_predicts(new_ranks, way, dtype):
    assert all(abs(error) < 0.1 for error in compare(new_ranks, (1, 2, 1), way, dtype, 12, 64))


@pytest.mark.slow
def test_a_model_of_48_layers_over_eight_ranks():
    """Prints the table of docs/benchmarks/pipeline.md."""
    with RankPool(8) as pool:
        errors = [
            error
            for way in WAYS
            for dtype in ("float32", "bfloat16")
            for error in compare(pool, (2, 2, 2), way, dtype, 48, 128)
        ]
    assert all(abs(error) < 0.1 for error in errors)
