"""wire_dtype="auto:lossy": schedules and wires take turns, exact sums are given up for a gain alone, ranks agree."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from auto_choice import measuring
from block_examples import WIDTH, make_stack, plain_blocks

from oases import OverlappedColumnLinear, OverlappedStack
from oases.autotp.parallelization import parallelize
from oases.core.blocks.chooser import Choice, Chooser, lossy_wires
from oases.core.execution import autotune
from oases.core.schedule import generate
from oases.errors import UsageError
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.models.options import Degrees
from oases_train.config import TrainConfig
from oases_train.plan import Run

SCHEDULES = (generate("fine_grained", 2, 1), generate("oases", 2, 2))
LABELS = [f"{name}{wire}" for wire in ("", " bfloat16", " int8") for name in ("fine_grained 1", "oases 2")]


def choose(path, seconds):
    """Feed times by hand. seconds[rank][candidate]."""
    autotune.cache_path = lambda: path
    chooser = Chooser([torch.nn.Identity()] * 2, "auto", lossy=True)
    tuning = chooser._tuning(SCHEDULES, ["bfloat16", "int8"], dist.group.WORLD, "key")
    assert [*tuning.candidates] == LABELS
    while tuning.choice is None:
        tuning.note(tuning.turn, seconds[dist.get_rank()][LABELS.index(tuning.turn)])
    return tuning.chosen, tuning.choice.wire


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([[1.0, 0.8, 0.9, 0.7, 0.85, 0.6]] * 2, ("oases 2 int8", "int8")),
        ([[1.0, 0.8, 0.9, 0.79, 0.85, 0.9]] * 2, ("oases 2", None)),  # 1 % is not worth an error
        ([[1.0, 0.99, 1.2, 0.985, 1.1, 1.1]] * 2, ("fine_grained 1", None)),
        ([[1.0, 0.8, 0.9, 0.7, 0.85, 0.6], [1.0, 0.8, 0.9, 0.65, 0.85, 0.95]], ("oases 2 bfloat16", torch.bfloat16)),
    ],
)
def test_the_fastest_on_the_slowest_rank(two_ranks, tmp_path, seconds, chosen):
    path = tmp_path / "choices.json"
    assert two_ranks.run(choose, path, seconds) == [chosen] * 2
    assert json.loads(path.read_text()) == {"key": chosen[0]}
    assert two_ranks.run(choose, path, seconds[::-1]) == [chosen] * 2  # from the file


def check_wires():
    world, single = dist.group.WORLD, dist.new_group(backend="fake")
    assert lossy_wires(world, torch.ones(1)) == ["bfloat16", "int8"]
    assert lossy_wires(world, torch.ones(1, dtype=torch.bfloat16)) == ["int8"]
    assert lossy_wires(world, torch.ones(1, dtype=torch.float64)) == ["bfloat16"]
    assert lossy_wires(single, torch.ones(1)) == ["bfloat16"]


def test_wires_are_those_that_the_group_carries(two_ranks):
    two_ranks.run(check_wires)


def check_stack(path, schedule, expected):
    """All candidates run, and outputs are equal on all ranks, whatever runs."""
    with measuring(path):
        return measured(schedule, expected)


def measured(schedule, expected):
    torch.manual_seed(0)
    blocks = transformer_blocks(GPTConfig(hidden=32, layers=1, heads=4, sequence=16), dist.group.WORLD)
    stack = OverlappedStack(blocks, schedule=schedule, wire_dtype="auto:lossy")
    x, seen = torch.randn(4, 16, 32), set()
    for _ in range(200):
        stack.zero_grad()
        y = stack(x)
        y.square().mean().backward()
        seen.add(str(stack.wire_dtype))
        both = [torch.empty_like(y) for _ in range(2)]
        dist.all_gather(both, y.detach())
        assert torch.equal(*both)
        (tuning,) = stack.chooser.tunings.values()
        if tuning.choice is not None:
            break
    assert seen == {"None", "torch.bfloat16", "int8"}
    assert [*tuning.candidates] == expected
    with torch.no_grad():
        stack(x)
    assert tuning.choice == Choice(stack.schedule, stack.wire_dtype)
    return tuning.chosen, stack.chooser.choices


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "labels"),
    [
        ("oases", ["oases 2", "oases 2 bfloat16", "oases 2 int8"]),
        (generate("sync", 2, 1), ["sync 1", "sync 1 bfloat16", "sync 1 int8"]),
        (
            "auto",
            [
                f"{name}{wire}"
                for wire in ("", " bfloat16", " int8")
                for name in ("fine_grained 1", "cross_pass 2", "oases 2", "cross_pass 4", "oases 4")
            ],
        ),
    ],
    ids=("by name", "a list", "auto"),
)
def test_stacks_measure_schedules_and_wires(two_ranks, tmp_path, schedule, labels):
    first, second = two_ranks.run(check_stack, tmp_path / "choices.json", schedule, labels)
    assert first == second
    chosen, resumed = first
    assert [*resumed.values()] == [chosen]


def check_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        stack = make_stack(plain_blocks(2, torch.float32), dist.group.WORLD, wire_dtype="auto:lossy")
        stack(torch.randn(4, 3, WIDTH)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert stack.wire_dtype is None


def test_deterministic_torch_sums_exactly(two_ranks):
    two_ranks.run(check_deterministic)


def check_refusals():
    with pytest.raises(ValueError, match=r"linear must be 'int8' or None, got 'auto:lossy'"):
        OverlappedColumnLinear(4, 4, wire_dtype="auto:lossy")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with pytest.raises(UsageError, match="'auto:lossy' measures whole passes and does not work with a pipeline"):
        parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh=mesh, wire_dtype="auto:lossy")


def test_linears_and_pipelines_refuse_it(two_ranks):
    two_ranks.run(check_refusals)


@pytest.mark.parametrize(
    "changes",
    [
        {"degrees": Degrees(data=2, tensor=2)},
        {"degrees": Degrees(pipeline=2, tensor=2), "micro_batches": 2},
        {"degrees": Degrees(tensor=4), "micro_batches": 2},
    ],
)
def test_runs_of_parts_of_steps_refuse_it(changes):
    config = TrainConfig(hidden=32, layers=2, heads=4, sequence=16, batch=8, wire_dtype="auto:lossy")
    message = "'auto:lossy' is not for a run of several stages, replicas or micro-batches; give one of none, bfloat16"
    with pytest.raises(UsageError, match=message):
        Run.of(dataclasses.replace(config, **changes), 4)
    assert Run.of(dataclasses.replace(config, degrees=Degrees(tensor=4)), 4).config.wire_dtype == "auto:lossy"
