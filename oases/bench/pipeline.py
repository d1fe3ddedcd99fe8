"""Pipeline schedules measured beside their simulation: a stage on each rank, compute emulated by timed waits.

More ranks than cores: what a rank computes takes no core (`TimedBlock`), what it sends is sent. All stages compute
again, and all take the same time, so that steps can be laid beside their closed forms.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.bench.memory import measure_memory
from oases.bench.stage_peers import PIPELINE_PEERS, TorchPipeline, parse_peers, stage_of_blocks
from oases.bench.stages import timed_step
from oases.errors import UsageError
from oases.execution.executor import Context
from oases.launch.ranks import require_agreement
from oases.models.timed import TimedBlock, TimedSeconds
from oases.parallel import OverlappedStack
from oases.parallel.mesh import Mesh
from oases.parallel.messages import Messages
from oases.parallel.pipeline import StageRun
from oases.schedule import Recompute, Schedule, ScheduleError, generate_pipeline
from oases.simulator import simulate
from oases.terminal import progress
from oases.train.config import option, settings

_REFERENCE = "one_f_one_b"
_BACKWARD = 2.0
"""Seconds of a backward pass, in forward passes."""


@dataclass(frozen=True)
class PipelineBenchConfig:
    """What is run on each rank, and how often."""

    pipelines: str = option(
        "gpipe,one_f_one_b,pre_recompute,last_no_recompute,shifted_critical_path,interleaved,zb_h1",
        "pipelines to measure, separated by commas",
    )
    micro_batches: int = option(8, "micro-batches of a step")
    forward_ms: float = option(
        50.0, "milliseconds of a stage's forward pass; recomputation takes as long, B twice it"
    )
    hidden: int = option(64, "width of what is sent, features")
    sequence: int = option(128, "tokens per sample; a micro-batch is one")
    iterations: int = option(5, "interleaved repetitions")
    peers: str = option("all", f"torch's own pipelines: {', '.join(PIPELINE_PEERS)}, all or none")

    def chosen(self, stages: int) -> dict[str, Schedule]:
        """The pipelines by name. UsageError where one cannot be, before any rank starts."""
        if not 0.1 <= self.forward_ms <= 10_000:
            raise UsageError(f"--forward-ms must be between 0.1 and 10000, got {self.forward_ms}")
        for name in ("hidden", "sequence", "iterations"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batches < stages:
            raise UsageError(f"--micro-batches {self.micro_batches} are fewer than the {stages} stages; give more")
        parse_peers(self.peers, PIPELINE_PEERS)
        found = {}
        for name in self.pipelines.split(","):
            try:
                found[name] = generate_pipeline(name, stages, self.micro_batches)
            except ScheduleError as error:
                raise UsageError(f"--pipelines: {error}") from error
        return found

    def seconds(self) -> dict[str, float]:
        """Of a whole stage, by pass."""
        forward = self.forward_ms / 1e3
        return {"F": forward, "R": forward, "B": _BACKWARD * forward}

    def layer(self, chunks: int) -> list[TimedBlock]:
        """The two blocks of a part, where a stage has so many parts."""
        share = self.seconds()["F"] / chunks / 2
        half = _BACKWARD * share / 2
        times = TimedSeconds(forward=share, backward=half, weight_gradient=half)
        return [TimedBlock(lambda _: times) for _ in range(2)]

    def peer(self, name: str, stages: int) -> TorchPipeline:
        """torch's pipeline on this rank of the default group: the same waits, the same messages."""
        stage = dist.get_rank()
        x = torch.ones(self.micro_batches, self.sequence, self.hidden)
        return TorchPipeline(
            stage_of_blocks(self.layer(1), 1, stage == 0), stage=stage, stages=stages, many=self.micro_batches, x=x,
            group=dist.group.WORLD, gpipe=name == "torch_gpipe",
        )  # fmt: skip


class _Contestant:
    """One pipeline on this rank."""

    def __init__(self, config: PipelineBenchConfig, pipeline: Schedule, mesh: Mesh) -> None:
        self.config, self.pipeline, self.mesh = config, pipeline, mesh
        alone = mesh.tensor(1)
        again: Recompute = "full" if pipeline.recomputes(mesh.stage) else "none"
        self._stacks = [
            OverlappedStack(config.layer(pipeline.chunks), process_group=alone, schedule="sync", recompute=again)
            for _ in range(pipeline.chunks)
        ]
        parts = pipeline.num_stages * pipeline.chunks
        self.messages = Messages(pipeline, mesh, [1] * (parts - 1))
        self.run = StageRun(pipeline, mesh.stage, self.messages)
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def forward(self, part: int, micro_batch: int, x: Tensor | None, context: Context) -> Tensor:
        """A micro-batch of one sample through a part; the last part's loss is a mean."""
        if x is None:
            x = torch.ones(1, self.config.sequence, self.config.hidden)
        stack = self._stacks[part // self.pipeline.num_stages]
        y: Tensor = stack(x, context=context)
        return y.mean() if part == self.pipeline.num_stages * self.pipeline.chunks - 1 else y

    def step(self) -> None:
        """One step, timed from when every rank has begun to when the slowest has ended."""
        spans: list[tuple[str, float, float]] = []
        self.seconds.append(timed_step(lambda: self.run.run(self.forward, spans=spans)))
        self.busy.append(sum(end - begin for op, begin, end in spans if op[0] in "FRBW"))

    def peak_bytes(self) -> int:
        """Of one step, of what this rank allocates."""
        run: Callable[[], Tensor] = lambda: torch.stack(self.run.run(self.forward) or [torch.zeros(())])  # noqa: E731
        return measure_memory(run, lambda _: None, torch.device("cpu")).peak

    def row(self, peak: int) -> dict[str, Any]:
        """What is said of it, the same on every rank."""
        step = statistics.median(self.seconds)
        timeline = simulate(self.pipeline, self.config.seconds())
        stages = range(self.pipeline.num_stages)
        idle = 1 - statistics.median(busy / all_ for busy, all_ in zip(self.busy, self.seconds, strict=True))
        everyone: list[Any] = [None] * self.pipeline.num_stages
        dist.all_gather_object(everyone, (step, idle, peak))
        predicted = timeline.total_seconds
        return {
            "step_seconds": max(seconds for seconds, _, _ in everyone),
            "predicted_seconds": predicted,
            "bubble": statistics.mean(share for _, share, _ in everyone),
            "predicted_bubble": statistics.mean(timeline.bubble(stage) / predicted for stage in stages),
            "peak_bytes_per_stage": [bytes_ for _, _, bytes_ in everyone],
        }


def run_pipeline_bench(config: PipelineBenchConfig, show_progress: bool) -> dict[str, Any]:
    """Measure on the default group, a stage on each rank; to be called by every rank."""
    require_agreement(settings(config))
    stages, rank = dist.get_world_size(), dist.get_rank()
    meshes = [Mesh([1], stage=stage, num_stages=stages) for stage in range(stages)]
    contestants = {
        name: _Contestant(config, pipeline, meshes[rank]) for name, pipeline in config.chosen(stages).items()
    }
    peers = {name: config.peer(name, stages) for name in parse_peers(config.peers, PIPELINE_PEERS)}
    peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}  # and a warm-up
    for peer in peers.values():
        peer.step()
        peer.seconds.clear()
    with progress("pipelines", config.iterations, show_progress and rank == 0) as advance:
        for done in range(1, config.iterations + 1):
            for contestant in contestants.values():
                contestant.step()
            for peer in peers.values():
                peer.step()
            advance(done)
    rows = {name: contestant.row(peaks[name]) for name, contestant in contestants.items()}
    others = {name: peer.row() for name, peer in peers.items()}
    result: dict[str, Any] = {"config": settings(config) | {"stages": stages}, "schedules": rows, "peers": others}
    if _REFERENCE in rows:
        base = rows[_REFERENCE]
        for other in others.values():
            other["speedup"] = base["step_seconds"] / other["step_seconds"]
        for row in rows.values():
            row["speedup"] = base["step_seconds"] / row["step_seconds"]
            row["predicted_speedup"] = base["predicted_seconds"] / row["predicted_seconds"]
    return result
