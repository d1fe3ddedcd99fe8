"""Pipeline schedules measured beside their simulation: a stage on each rank, compute emulated by timed waits.

More ranks than cores: what a rank computes takes no core (`TimedBlock`), what it sends is sent. All stages compute
again, and all take the same time, so that steps can be laid beside their closed forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import RenderableType
from torch import Tensor, nn

from oases.core.execution.communication import quantised_type
from oases.core.execution.executor import Context
from oases.core.schedule import Recompute, Schedule, ScheduleError, generate_pipeline
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages
from oases.errors import UsageError
from oases.layers import OverlappedStack
from oases.simulator import simulate
from oases_bench.harness import (
    BenchConfig,
    Benchmark,
    Ranks,
    Result,
    add_speedups,
    checked_settings,
    interleave,
    parse_peers,
)
from oases_bench.stage_baselines import PIPELINE_BASELINES, TorchPipeline, stage_of_blocks
from oases_bench.stage_steps import StageSteps, stages_table
from oases_bench.timed_block import BlockSeconds, TimedBlock
from oases_train.config import option

_REFERENCE = "one_f_one_b"
_BACKWARD = 2.0
"""Seconds of a backward pass, in forward passes."""


@dataclass(frozen=True)
class PipelineBenchConfig(BenchConfig):
    """Pipelines, emulated compute and repetitions."""

    pipelines: str = option(
        "gpipe,one_f_one_b,pre_recompute,last_no_recompute,shifted_critical_path,interleaved,zb_h1,zb_v",
        "pipelines to measure, comma-separated; one_f_one_b:int8 sends messages in int8",
    )
    micro_batches: int = option(8, "micro-batches of a step")
    forward_ms: float = option(
        50.0, "milliseconds of a stage's forward pass; recomputation takes as long, B twice it"
    )
    hidden: int = option(64, "width of what is sent, features")
    sequence: int = option(128, "tokens per sample; a micro-batch is one")
    iterations: int = option(5, "interleaved repetitions")
    peers: str = option("all", f"torch's own pipelines: {', '.join(PIPELINE_BASELINES)}, all or none")

    def prepared(self, ranks: Ranks) -> PipelineBenchConfig:
        """See `BenchConfig`."""
        self.chosen(ranks.size)
        return self

    def described(self) -> str:
        """See `BenchConfig`."""
        return "{} stages {}; compute is emulated, communication is real"

    def chosen(self, stages: int) -> dict[str, tuple[Schedule, str]]:
        """The pipelines by name, each with the type of its messages, "" for their own.

        UsageError where one cannot be, before any rank starts.
        """
        if not 0.1 <= self.forward_ms <= 10_000:
            raise UsageError(f"--forward-ms must be between 0.1 and 10000, got {self.forward_ms}")
        self.require_least(1, "hidden", "sequence", "iterations")
        if self.micro_batches < stages:
            raise UsageError(f"--micro-batches {self.micro_batches} are fewer than the {stages} stages; give more")
        parse_peers(self.peers, PIPELINE_BASELINES)
        found = {}
        for text in self.pipelines.split(","):
            name, _, wire = text.partition(":")
            try:
                found[text] = generate_pipeline(name, stages, self.micro_batches), wire
            except ScheduleError as error:
                raise UsageError(f"--pipelines: {error}") from error
            if wire:
                quantised_type(f"--pipelines {text}: the type of messages", wire)
        return found

    def seconds(self) -> dict[str, float]:
        """Seconds of a stage by pass."""
        forward = self.forward_ms / 1e3
        return {"F": forward, "R": forward, "B": _BACKWARD * forward}

    def layer(self, chunks: int) -> list[TimedBlock]:
        """The two blocks of a part, where a stage has so many parts."""
        share = self.seconds()["F"] / chunks / 2
        half = _BACKWARD * share / 2
        times = BlockSeconds(forward=share, backward=half, weight_gradient=half)
        return [TimedBlock(lambda _: times) for _ in range(2)]

    def peer(self, name: str, stages: int) -> TorchPipeline:
        """torch's pipeline on this rank of the default group: the same waits, the same messages."""
        stage = dist.get_rank()
        x = torch.ones(self.micro_batches, self.sequence, self.hidden)
        return TorchPipeline(
            stage_of_blocks(self.layer(1), stage == 0), stage=stage, stages=stages, many=self.micro_batches, x=x,
            group=dist.group.WORLD, gpipe=name == "torch_gpipe",
        )  # fmt: skip


class _Contestant(StageSteps):
    """One pipeline on this rank."""

    def __init__(self, config: PipelineBenchConfig, pipeline: Schedule, mesh: Mesh, wire: str) -> None:
        self.config, self.pipeline = config, pipeline
        alone = mesh.tensor(1)
        again: Recompute = "full" if pipeline.recomputes(mesh.stage) else "none"
        self._stacks = nn.ModuleList(
            OverlappedStack(config.layer(pipeline.chunks), process_group=alone, schedule="sync", recompute=again)
            for _ in range(pipeline.chunks)
        )
        self.messages = StageMessages(pipeline, mesh, [1] * (pipeline.num_blocks - 1), wire=wire)
        super().__init__(pipeline, mesh, self._stacks, self.messages)

    def forward(self, part: int, micro_batch: int, inputs: Sequence[Tensor], context: Context) -> Sequence[Tensor]:
        """A micro-batch of one sample through a part."""
        x = inputs[0] if inputs else torch.ones(1, self.config.sequence, self.config.hidden)
        stack = self._stacks[part // self.pipeline.num_stages]
        y: Tensor = stack(x, context=context)
        return [y.mean() if part == self.pipeline.num_blocks - 1 else y]


def run_pipeline_bench(config: PipelineBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, a stage on each rank. Called on every rank."""
    named = checked_settings(config)
    stages = dist.get_world_size()
    mesh = [Mesh([1], stage=stage, num_stages=stages) for stage in range(stages)][dist.get_rank()]
    ours = {
        name: _Contestant(config, pipeline, mesh, wire) for name, (pipeline, wire) in config.chosen(stages).items()
    }
    peers = {name: config.peer(name, stages) for name in parse_peers(config.peers, PIPELINE_BASELINES)}
    peaks = {name: contestant.peak_bytes() for name, contestant in ours.items()}  # and a warm-up
    for peer in peers.values():
        peer.warm_up()
    interleave([*ours.values(), *peers.values()], config.iterations, "pipelines", shows)
    seconds = config.seconds()
    rows = {name: each.row(peaks[name], simulate(each.pipeline, seconds)) for name, each in ours.items()}
    others = {name: peer.row() for name, peer in peers.items()}
    add_speedups(rows.get(_REFERENCE), rows.values(), predicted=True)
    add_speedups(rows.get(_REFERENCE), others.values())
    return {"config": named | {"stages": stages}, "schedules": rows, "peers": others}


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per pipeline."""
    yield stages_table(result)


BENCHMARK = Benchmark(
    "pipeline",
    "pipeline schedules measured beside their simulation, a stage on a rank",
    PipelineBenchConfig(),
    run_pipeline_bench,
    shown,
    size=4,
)
