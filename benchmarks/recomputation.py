"""Stage-aware recomputation: how even it makes the stages' memory, and what recomputing less saves.

Memory is that of the built-in GPT in training, on real ranks. Time is that of the same plans over timed blocks: two
cores cannot run the compute of a rank for every stage at once.

    python benchmarks/recomputation.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import RenderableType
from torch import Tensor

from oases.core.schedule import ScheduleError
from oases.distributed.mesh import Mesh
from oases.errors import UsageError
from oases.planner.predict import Predictor
from oases.planner.recomputation import Recomputation, as_much_as_fits
from oases.plans.plan import Plan, Segment, Stage
from oases.profile.memory import measure_memory
from oases.simulator.hardware import Hardware
from oases.simulator.links import LinkModel
from oases.terminal import progress
from oases_bench.command_line import script
from oases_bench.harness import (
    Benchmark,
    Ranks,
    Result,
    add_speedups,
    checked_settings,
    first_rank,
    gather_objects,
    interleave,
)
from oases_bench.stage_steps import EmulatedConfig, PlannedSteps, stages_table
from oases_train.config import config_for, option
from oases_train.trainer import Trainer

_FREE = LinkModel(0.0, 1e12)
"""Messages between the stages are small beside the compute."""


@dataclass(frozen=True)
class RecomputationBenchConfig(EmulatedConfig):
    """The model and its pipeline, a stage on each rank, and the device that its compute is emulated for."""

    pipelines: str = option("one_f_one_b,shifted_critical_path", "pipelines to measure, comma-separated")
    layers: int = option(48, "transformer layers; what fits is a whole number of them, so many make it even")
    micro_batches: int = option(8, "micro-batches of a step")
    kept_layers: int = option(
        2, "layers that the first stage may keep; the memory that this takes is the budget of all"
    )
    iterations: int = option(3, "interleaved repetitions")

    def prepared(self, ranks: Ranks) -> RecomputationBenchConfig:
        """See `BenchConfig`."""
        self.plans(ranks.size)
        return self

    def described(self) -> str:
        """See `BenchConfig`."""
        return "{} stages {}; memory is that of training, compute is emulated"

    def plans(self, stages: int) -> dict[str, Plan]:
        """By "PIPELINE/full" and "PIPELINE/fits". UsageError for a configuration that cannot be."""
        if self.layers % stages or self.layers < stages:
            raise UsageError(f"--layers {self.layers} do not divide over {stages} stages; give a multiple")
        if not 1 <= self.kept_layers <= self.layers // stages:
            raise UsageError(
                f"--kept-layers must be from 1 to the {self.layers // stages} layers of a stage, got "
                f"{self.kept_layers}"
            )
        if self.iterations < 1 or self.micro_batches < stages:
            raise UsageError(
                f"--iterations must be at least 1, got {self.iterations}, and --micro-batches at least the {stages} "
                f"stages, got {self.micro_batches}"
            )
        model = self.model()
        segment = Segment(model.num_blocks // stages, 1, "fine_grained", 1)
        predictor, found = Predictor(self.device()), {}
        for name in self.pipelines.split(","):
            try:
                plain = Plan(
                    model, stages, stages, self.micro_batches, self.micro_batches, (Stage((segment,)),) * stages,
                    pipeline=name,
                )  # fmt: skip
                full = Recomputation("full").applied(plain, 0, predictor.peak_bytes)
                first = replace(segment, recomputed_layers=self.layers // stages - self.kept_layers)
                tight = replace(plain, stages=(Stage((first,)), *full.stages[1:]))
                budget = predictor.peak_bytes(tight, 0)
                found[f"{name}/full"] = full
                found[f"{name}/fits"] = as_much_as_fits(plain, budget, predictor.peak_bytes)
            except ScheduleError as error:
                raise UsageError(f"--pipelines: {error}") from error
        return found

    def device(self) -> Hardware:
        """The emulated device."""
        return self.hardware(1 << 10, _FREE, _FREE, memory=1 << 40)


def _trained(plan: Plan, data: str) -> tuple[int, int]:
    """Bytes that this rank holds all the time, and at most besides, of a step of the built-in GPT by this plan."""
    trainer = Trainer(config_for(plan, {"data": data, "steps": 1, "warmup": 1, "validation_batches": 1}), plan=plan)
    trainer.step()  # gradients, moments and connections are there afterwards

    def step() -> Tensor:
        return torch.tensor(trainer.backward(1))

    peak = measure_memory(step, lambda _: None, torch.device("cpu")).peak
    assert trainer.stage is not None
    assert trainer.mesh is not None
    assert isinstance(trainer.optimizer, torch.optim.Optimizer)  # nothing is sharded here
    trainer.close()
    # Gradients are allocated in every step, so they are part of its allocations.
    tensors = [*trainer.model.parameters(), *_moments(trainer.optimizer)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors), peak


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def run_recomputation_bench(config: RecomputationBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, a stage on each rank. Called on every rank."""
    named, stages = checked_settings(config), dist.get_world_size()
    plans = config.plans(stages)
    mesh, hardware = Mesh.of(next(iter(plans.values()))), config.device()
    predictor = Predictor(hardware, stack_only=True)
    peaks, steps = {}, {name: PlannedSteps(plan, hardware, mesh) for name, plan in plans.items()}
    with tempfile.TemporaryDirectory() as folder, progress("memory", len(plans), shows and first_rank()) as advance:
        data = Path(folder) / "text.txt"  # each rank's own, of the same content
        data.write_text("any text does. " * (4 * config.sequence * config.micro_batches))
        for done, (name, plan) in enumerate(plans.items(), start=1):
            peaks[name] = _trained(plan, str(data))
            steps[name].backward()  # warms up
            advance(done)
    interleave(steps.values(), config.iterations, "steps", shows)
    rows = {name: each.row(sum(peaks[name]), predictor.timeline(each.plan)) for name, each in steps.items()}
    for name, row in rows.items():
        row["step_bytes_per_stage"] = gather_objects(peaks[name][1])
        peak = row["peak_bytes_per_stage"]
        row["last_over_first"] = peak[-1] / peak[0]
        add_speedups(rows[name.replace("/fits", "/full")], [row], predicted=True)
    return {"config": named | {"stages": stages}, "schedules": rows, "peers": {}}


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per pipeline, with everything recomputed and with what does not fit."""
    yield stages_table(result)


BENCHMARK = Benchmark(
    "recomputation",
    "stages that recompute what does not fit: how even, and what it saves",
    RecomputationBenchConfig(),
    run_recomputation_bench,
    shown,
    size=4,
)

if __name__ == "__main__":
    script(BENCHMARK, __file__)
