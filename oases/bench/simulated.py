"""An overlap benchmark beside its simulation: every schedule's step measured, predicted from a profile, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oases.bench.config import OverlapConfig
from oases.bench.overlap import OverlapBench, measured
from oases.errors import UsageError
from oases.plans.shape import ModelShape
from oases.schedule import Schedule
from oases.simulator import simulate
from oases.simulator.drawing import draw_timelines
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.page import Section, write_page
from oases.simulator.timeline import Timeline


@dataclass(frozen=True)
class Beside:
    """One step of a schedule as it was measured, over all ranks, and as it is predicted of any of them."""

    name: str
    measured: Timeline
    predicted: Timeline


def model_of(config: OverlapConfig) -> ModelShape:
    """The stack that the benchmark runs."""
    return ModelShape(config.hidden, config.layers, config.heads, config.sequence, dtype=config.dtype)


def predicted(config: OverlapConfig, schedule: Schedule, hardware: Hardware, tp: int) -> Timeline:
    """One step of a schedule of an overlap benchmark, as the simulator says."""
    model = model_of(config)
    kinds = [model.kind_of(block) for block in range(model.num_blocks)]
    return simulate(schedule, stack_costs(hardware, model, kinds, tp, config.batch, schedule))


def check(config: OverlapConfig, hardware: Hardware, tp: int) -> None:
    """Raise UsageError where nothing can be predicted, before any rank starts."""
    for name in config.names:
        if name != "auto" and config.contestant(name)[1] is not None:
            raise UsageError(
                f"schedule {name!r} sends another type than it computes in, which is not simulated; leave out its "
                "suffix, or --simulate"
            )
    model = model_of(config)
    for kind in ("attention", "mlp"):
        hardware.block_times(model, kind, tp, config.batch)


def run_simulated_bench(
    config: OverlapConfig, hardware: Hardware, show_progress: bool
) -> tuple[dict[str, Any], list[Beside]]:
    """The benchmark's result with `predicted_seconds` of every schedule; to be called by every rank."""
    group = dist.group.WORLD
    assert group is not None
    bench = OverlapBench(config, group)
    result = measured(bench, show_progress)
    steps = []
    for name, schedule in bench.schedules.items():
        found = predicted(config, schedule, hardware, dist.get_world_size())
        row = result["schedules"][name]
        row["predicted_seconds"] = found.total_seconds
        row["prediction_error"] = found.total_seconds / row["step_seconds"] - 1
        spans = tuple(replace(span, lane="link") if span.lane != "compute" else span for span in found.spans)
        steps.append(Beside(name, bench.timeline(name), replace(found, spans=spans, held=())))
    return result, steps


def write_comparison(path: Path, result: dict[str, Any], steps: Sequence[Beside], hardware: Hardware) -> None:
    """A page with a row and two timelines for every schedule, all to one time scale."""
    config = result["config"]
    timelines = []
    for step in steps:
        timelines += [
            replace(step.measured, name=f"{step.name}, measured"),
            replace(step.predicted, name=f"{step.name}, predicted", who="predicted rank"),
        ]
    write_page(
        path,
        title="Measured and predicted steps",
        subtitle=f"{config['layers']} layers of width {config['hidden']}, batch {config['batch']} x "
        f"{config['sequence']}, {config['tp']} ranks; predicted from the profile {hardware.name}",
        header=("schedule", "measured, median", "predicted", "error"),
        rows=[
            (
                name, f"{1e3 * row['step_seconds']:.0f} ms", f"{1e3 * row['predicted_seconds']:.0f} ms",
                f"{100 * row['prediction_error']:+.1f} %",
            )
            for name, row in result["schedules"].items()
        ],
        sections=[
            Section(
                "Where the time goes",
                "One measured step, which need not be the median one, and below it the predicted one. Orange: an "
                "all-reduce is on the link. Pale: the compute stands still for it. Names are BLOCK.SUB-BATCH. Drag "
                "to zoom, hover for names and times.",
                draw_timelines(timelines),
            )
        ],
    )  # fmt: skip
