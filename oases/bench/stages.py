"""What the benchmarks of several stages share: a plan's steps over timed blocks, and how a step is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.bench.memory import measure_memory
from oases.bench.plans import timed_block
from oases.execution.executor import Context
from oases.parallel.average import GradientAverage
from oases.parallel.mesh import Mesh
from oases.parallel.messages import Messages
from oases.parallel.pipeline import StageRun
from oases.parallel.planned_stack import PlannedStack
from oases.plans.check import pipeline_of
from oases.plans.plan import Plan
from oases.simulator.hardware import Hardware
from oases.simulator.timeline import Timeline


def timed_step(run: Callable[[], Any]) -> float:
    """Seconds from when every rank has begun to when the slowest has ended."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


class PlannedSteps:
    """A plan's steps on this rank, as the trainer runs them, over timed blocks: `stack_only`, as predictors say.

    split: whether messages between stages are cut over tensor-parallel ranks.
    """

    def __init__(self, plan: Plan, hardware: Hardware, mesh: Mesh, *, split: bool = True) -> None:
        self.plan, self.mesh = plan, mesh
        self.seconds: list[float] = []
        """Of the steps so far."""
        self._busy: list[float] = []
        self._stack = PlannedStack(plan, lambda number, group: timed_block(hardware, plan.model, number, group), mesh)
        samples = int(plan.samples(plan.stages[0].segments[0].tp))
        self._x = torch.ones(samples, plan.model.sequence, plan.model.hidden)
        self._average = GradientAverage(self._stack.parts())
        pipeline, messages = pipeline_of(plan), None
        if len(plan.stages) > 1:
            degrees = [part.last_degree for part in plan.parts[:-1]]
            messages = Messages(pipeline, mesh, degrees, split=split)
        self._run = StageRun(pipeline, mesh.stage, messages)

    def _forward(self, part: int, micro_batch: int, x: Tensor | None, context: Context) -> Tensor:
        if x is None:
            x = self._x.clone().requires_grad_()
        y = self._stack.run(x, part // len(self.plan.stages), context)
        return y.mean() / self.plan.micro_batches if part == len(self.plan.parts) - 1 else y

    def backward(self, spans: list[tuple[str, float, float]] | None = None) -> list[Tensor]:
        """The passes of a step, gradients averaged; the losses on the last stage."""
        return self._run.run(self._forward, self._average.overlapped(), spans=spans)

    def gradients(self) -> dict[str, Tensor]:
        """By the name in the whole model."""
        return {name: p.grad.clone() for name, p in self._stack.named_parameters() if p.grad is not None}

    def step(self) -> None:
        """One step, timed from when every rank has begun to when the slowest has ended."""
        spans: list[tuple[str, float, float]] = []
        self.seconds.append(timed_step(lambda: self.backward(spans)))
        self._busy.append(sum(end - begin for op, begin, end in spans if op[0] in "FRBW"))
        self._stack.zero_grad()

    def peak_bytes(self) -> int:
        """Of one step, of what this rank allocates."""
        run: Callable[[], Tensor] = lambda: torch.stack(self.backward() or [torch.zeros(())])  # noqa: E731
        peak = measure_memory(run, lambda _: None, torch.device("cpu")).peak
        self._stack.zero_grad()
        return peak

    def row(self, peak: int, found: Timeline) -> dict[str, Any]:
        """What is said of it, the same on every rank. found: a step as it is predicted."""
        idle = 1 - statistics.median(busy / all_ for busy, all_ in zip(self._busy, self.seconds, strict=True))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.mesh.stage, idle, peak))
        stages, total = range(len(self.plan.stages)), found.total_seconds
        step = statistics.median(self.seconds)
        return {
            "step_seconds": step,
            "predicted_seconds": total,
            "prediction_error": total / step - 1,
            "bubble": statistics.mean(share for _, share, _ in everyone),
            "predicted_bubble": statistics.mean(found.bubble(stage) / total for stage in stages),
            "predicted_exposed": statistics.mean(found.exposed(stage) / total for stage in stages),
            "peak_bytes_per_stage": [max(b for number, _, b in everyone if number == stage) for stage in stages],
            "steps": self.seconds,
            "plan": self.plan.text(),
        }
