"""Stage-aware recomputation: how even it makes the stages' memory, and what recomputing less saves.

Memory is that of the built-in GPT in training, on real ranks. Time is that of the same plans over timed blocks: two
cores cannot run the compute of a rank for every stage at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.bench.memory import measure_memory
from oases.bench.plans import emulated_blocks
from oases.bench.stages import PlannedSteps
from oases.errors import UsageError
from oases.launch.ranks import require_agreement
from oases.parallel.mesh import Mesh
from oases.planner.predict import Predictor
from oases.planner.recomputation import Recomputation, as_much_as_fits
from oases.plans.plan import Plan, Segment, Stage
from oases.plans.shape import ModelShape
from oases.schedule import ScheduleError
from oases.simulator.hardware import Device, Hardware
from oases.simulator.links import LinkModel
from oases.terminal import progress
from oases.train.config import config_for, option, settings
from oases.train.trainer import Trainer

_FREE = LinkModel(0.0, 1e12)
"""Messages between the stages are small beside the compute."""


@dataclass(frozen=True)
class RecomputationBenchConfig:
    """The model and its pipeline, a stage on each rank, and the device that its compute is emulated for."""

    pipelines: str = option("one_f_one_b,shifted_critical_path", "pipelines to measure, separated by commas")
    hidden: int = option(256, "width of the model, features")
    layers: int = option(48, "transformer layers; what fits is a whole number of them, so many make it even")
    sequence: int = option(128, "tokens per sample; a micro-batch is one")
    micro_batches: int = option(8, "micro-batches of a step")
    kept_layers: int = option(
        2, "layers that the first stage may keep; the memory that this takes is the budget of all"
    )
    flops: float = option(2e10, "FLOP/s of the emulated device")
    iterations: int = option(3, "interleaved repetitions")

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
        model = ModelShape(self.hidden, self.layers, max(1, self.hidden // 64), self.sequence, vocabulary=256)
        segment = Segment(model.num_blocks // stages, 1, "fine_grained", 1)
        predictor, found = Predictor(self.hardware(model)), {}
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

    def hardware(self, model: ModelShape) -> Hardware:
        """The emulated device."""
        device = Device("emulated", 1 << 40, {"float32": self.flops}, self.flops / 4, 2e-4)
        plain = Hardware("emulated", device, 1 << 10, _FREE, _FREE)
        return replace(plain, blocks=emulated_blocks(plain, model))


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
    # Gradients are made anew in every step: they are among what it allocates.
    tensors = [*trainer.model.parameters(), *_moments(trainer.optimizer)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors), peak


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def run_recomputation_bench(config: RecomputationBenchConfig, data: str, show_progress: bool) -> dict[str, Any]:
    """Measure on the default group, a stage on each rank; to be called by every rank. data: a text file."""
    require_agreement(settings(config))
    plans, visible = config.plans(dist.get_world_size()), show_progress and dist.get_rank() == 0
    mesh = Mesh.of(next(iter(plans.values())))
    hardware = config.hardware(next(iter(plans.values())).model)
    predictor = Predictor(hardware, stack_only=True)
    peaks, steps = {}, {name: PlannedSteps(plan, hardware, mesh) for name, plan in plans.items()}
    with progress("memory", len(plans), visible) as advance:
        for done, (name, plan) in enumerate(plans.items(), start=1):
            peaks[name] = _trained(plan, data)
            steps[name].backward()  # warms up
            advance(done)
    with progress("steps", config.iterations, visible) as advance:
        for done in range(1, config.iterations + 1):
            for each in steps.values():
                each.step()
            advance(done)
    rows = {name: each.row(sum(peaks[name]), predictor.timeline(each.plan)) for name, each in steps.items()}
    for name, row in rows.items():
        everyone: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everyone, peaks[name][1])
        row["step_bytes_per_stage"] = everyone
        base, peak = rows[name.replace("/fits", "/full")], row["peak_bytes_per_stage"]
        row["last_over_first"] = peak[-1] / peak[0]
        row["speedup"] = base["step_seconds"] / row["step_seconds"]
        row["predicted_speedup"] = base["predicted_seconds"] / row["predicted_seconds"]
    return {"config": settings(config) | {"stages": dist.get_world_size()}, "schedules": rows, "peers": {}}
