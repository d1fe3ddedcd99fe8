"""Steps of pipelines and plans over timed blocks, which emulate the compute of a device."""

from __future__ import annotations

import itertools
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup, group_size
from oases.core.schedule import Schedule
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages
from oases.distributed.pipeline import StageRunner
from oases.distributed.planned_stack import PlannedStack
from oases.errors import UsageError
from oases.plans.check import pipeline_of
from oases.plans.gpt import gpt
from oases.plans.layered import Model
from oases.plans.plan import Plan
from oases.profile.memory import measure_memory
from oases.simulator.hardware import Device, Hardware, MeasuredBlock
from oases.simulator.links import LinkModel
from oases.simulator.timeline import Timeline
from oases.terminal import percent, table
from oases_bench.harness import BenchConfig, Result, gather_objects, milliseconds, signed_percent, timed_step, times
from oases_bench.timed_block import BlockSeconds, TimedBlock
from oases_train.config import option


@dataclass(frozen=True)
class EmulatedConfig(BenchConfig):
    """A model, and the device that its compute is emulated for."""

    hidden: int = option(256, "hidden size, features")
    layers: int = option(4, "transformer layers")
    sequence: int = option(128, "sequence length, tokens per sample")
    flops: float = option(2e10, "FLOP/s of the emulated device")

    def model(self) -> Model:
        """Its shape. UsageError for one that cannot be."""
        if not 1e6 <= self.flops <= 1e15:
            raise UsageError(f"--flops must be between 1e6 and 1e15, got {self.flops}")
        self.require_least(1, "hidden", "layers", "sequence")
        return gpt(self.hidden, self.layers, max(1, self.hidden // 64), self.sequence, vocabulary=256)

    def hardware(self, per_node: int, node: LinkModel, cluster: LinkModel, memory: int = 1 << 34) -> Hardware:
        """The device behind these links, its memory in bytes."""
        device = Device("emulated", memory, {"float32": self.flops}, self.flops / 4, 2e-4)
        plain = Hardware("emulated", device, per_node, node, cluster)
        return replace(plain, blocks=emulated_blocks(plain, self.model()))


def emulated_blocks(plain: Hardware, model: Model) -> tuple[MeasuredBlock, ...]:
    """Times of a model's blocks on an emulated device, as if they had been measured."""
    rows = []
    for kind, tp, samples in itertools.product(model.layer_kinds[0], (1, 2, 4, 8), (1.0, 64.0)):
        if not model.fits_degree(tp):
            continue
        t = plain.block_times(model, kind, tp, samples)
        # A timed block runs whole when it runs again, and does C's backward in its own.
        times = replace(
            t, recompute=t.forward, recompute_whole=t.forward, combine_backward=0.0,
            backward=t.backward + t.combine_backward,
        )  # fmt: skip
        rows.append(
            MeasuredBlock(
                model.block_name(kind), model.hidden, model.heads, model.sequence, model.dtype, tp, samples, times
            )
        )
    return tuple(rows)


def timed_block(hardware: Hardware, model: Model, number: int, group: ProcessGroup | None) -> TimedBlock:
    """The block of this number, cut over the group, that waits as long as the emulated device would compute."""
    kind, tp = model.kind_of(number), group_size(group)

    def seconds(samples: float) -> BlockSeconds:
        times = hardware.block_times(model, kind, tp, samples)
        return BlockSeconds(**{item.name: getattr(times, item.name) for item in fields(BlockSeconds)})

    return TimedBlock(seconds, num_parameters=model.block_parameters(kind, tp))


class StageSteps(ABC):
    """Steps of a pipeline on this rank, timed, with the time that it computed.

    stack: its blocks. messages: between the stages; None where there is one.
    """

    def __init__(self, pipeline: Schedule, mesh: Mesh, stack: nn.Module, messages: StageMessages | None) -> None:
        self.mesh, self.stack, self.stages = mesh, stack, pipeline.num_stages
        self.seconds: list[float] = []
        """Durations of the steps so far."""
        self.busy: list[float] = []
        self._run = StageRunner(pipeline, mesh.stage, messages)

    @abstractmethod
    def forward(self, part: int, micro_batch: int, inputs: Sequence[Tensor], context: Context) -> Sequence[Tensor]:
        """A micro-batch through a part; the last part's loss is a mean."""

    average: GradientAverager | None = None
    """Average of gradients over replicas."""

    def backward(self, spans: list[tuple[str, float, float]] | None = None) -> list[Tensor]:
        """The passes of a step, gradients averaged; the losses on the last stage."""
        return self._run.run(self.forward, self.average, spans=spans)

    def step(self) -> None:
        """One step, timed from when every rank has begun to when the slowest has ended."""
        spans: list[tuple[str, float, float]] = []
        self.seconds.append(timed_step(lambda: self.backward(spans)))
        self.busy.append(sum(end - begin for op, begin, end in spans if op[0] in "FRBW"))
        self.stack.zero_grad()

    def peak_bytes(self) -> int:
        """Peak memory allocated by this rank in a step, bytes."""
        run: Callable[[], Tensor] = lambda: torch.stack(self.backward() or [torch.zeros(())])  # noqa: E731
        peak = measure_memory(run, lambda _: None, torch.device("cpu")).peak
        self.stack.zero_grad()
        return peak

    def row(self, peak: int, found: Timeline) -> Result:
        """Result row, equal on all ranks. found: predicted timeline of a step."""
        idle = 1 - statistics.median(busy / all_ for busy, all_ in zip(self.busy, self.seconds, strict=True))
        everyone = gather_objects((self.mesh.stage, statistics.median(self.seconds), idle, peak))
        stages, total = range(self.stages), found.total_seconds
        step = max(seconds for _, seconds, _, _ in everyone)
        return {
            "step_seconds": step,
            "predicted_seconds": total,
            "prediction_error": total / step - 1,
            "bubble": statistics.mean(share for _, _, share, _ in everyone),
            "predicted_bubble": statistics.mean(found.bubble(stage) / total for stage in stages),
            "predicted_exposed": statistics.mean(found.exposed(stage) / total for stage in stages),
            "peak_bytes_per_stage": [max(b for number, _, _, b in everyone if number == stage) for stage in stages],
            "steps": self.seconds,
        }


class PlannedSteps(StageSteps):
    """A plan's steps on this rank, as the trainer runs them, over timed blocks: `stack_only`, as predictors say."""

    def __init__(self, plan: Plan, hardware: Hardware, mesh: Mesh) -> None:
        self.plan = plan
        self._stack = PlannedStack(plan, lambda number, group: timed_block(hardware, plan.model, number, group), mesh)
        samples = int(plan.samples(plan.stages[0].segments[0].tp))
        self._x = torch.ones(samples, plan.model.sequence, plan.model.hidden)
        self.average = GradientAverager(self._stack.parts())
        pipeline, messages = pipeline_of(plan), None
        if len(plan.stages) > 1:
            degrees = [part.last_degree for part in plan.parts[:-1]]
            messages = StageMessages(pipeline, mesh, degrees)
        super().__init__(pipeline, mesh, self._stack, messages)

    def forward(self, part: int, micro_batch: int, inputs: Sequence[Tensor], context: Context) -> Sequence[Tensor]:
        """See `StageSteps`."""
        x = inputs[0] if inputs else self._x.clone().requires_grad_()
        y = self._stack.run(x, part // len(self.plan.stages), context)
        return [y.mean() / self.plan.micro_batches if part == len(self.plan.parts) - 1 else y]

    def row(self, peak: int, found: Timeline) -> Result:
        """See `StageSteps`; with the plan's text."""
        return super().row(peak, found) | {"plan": self.plan.text()}


def stages_table(result: Result) -> Any:
    """A row for every contestant, peers below."""
    columns = (
        "pipeline", "step", "predicted", "error", "speedup", "predicted", "bubble", "predicted", "peak MB by stage",
    )  # fmt: skip
    rows = []
    for name, row in (*result["schedules"].items(), *result["peers"].items()):
        predictions = ("-", "-")
        if "predicted_seconds" in row:
            predictions = (milliseconds(row["predicted_seconds"]), signed_percent(row["prediction_error"]))
        rows.append(
            (
                name, milliseconds(row["step_seconds"]), *predictions, times(row.get("speedup")),
                times(row.get("predicted_speedup")), percent(row.get("bubble")), percent(row.get("predicted_bubble")),
                " ".join(f"{num_bytes / 1e6:.2f}" for num_bytes in row.get("peak_bytes_per_stage", ())) or "-",
            )
        )  # fmt: skip
    return table(columns, rows)
