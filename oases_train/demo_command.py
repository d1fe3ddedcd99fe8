"""`oases demo`: train the same GPT on text with synchronous and with overlapped tensor parallelism.

The two runs alternate step by step, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oases.files import write_text
from oases.launch.ranks import require_agreement
from oases.profile.config import OverlapConfig
from oases.profile.overlap import OverlapBench
from oases.simulator.drawing import Section, draw_curves, draw_timelines, write_page
from oases.simulator.timeline import Timeline, trace_json
from oases.terminal import console, percent, progress, table, working
from oases_train.config import TrainConfig
from oases_train.trainer import Trainer

SCHEDULES = ("sync", "oases")
_TIMELINES = (
    "One measured step of the transformer stack under each schedule, on one time scale. Orange: an all-reduce is on "
    "the link. Pale: compute waits for it. Names are BLOCK.SUB-BATCH. Drag to zoom, hover for names and times."
)
_LOSSES = "Training loss per step. A schedule changes the order of execution, not the result, so the curves coincide."
_MOST_OF_IDEAL = 1.1
"""A step cannot be faster than the ideal; beyond this excess, in measurements, other load has disturbed them."""
HEADER = ("schedule", "step", "against sync", "tokens/s", "hidden", "of ideal", "loss", "validation loss")


def run_demo(config: TrainConfig) -> dict[str, Any]:
    """Train under the schedules in turns, then measure their overlap. Called on every rank."""
    require_agreement(dataclasses.asdict(config))
    group = dist.group.WORLD
    assert group is not None
    first = dist.get_rank() == 0
    with working("building the model", first):
        trainers = {
            name: Trainer(dataclasses.replace(config, schedule=name), process_group=group) for name in SCHEDULES
        }
    losses: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    with progress("training", config.steps, first, log=True) as advance:
        for step in range(config.steps):
            for name, trainer in trainers.items():
                dist.barrier(group=group)
                start = time.perf_counter()
                losses[name].append(trainer.step())
                seconds[name].append(time.perf_counter() - start)
            note = "  ".join(
                f"{name}: loss {losses[name][-1]:.3f}, {1e3 * seconds[name][-1]:.0f} ms" for name in SCHEDULES
            )
            advance(step + 1, note)
    validation = {name: trainer.validate() for name, trainer in trainers.items()}
    del trainers
    bench = OverlapBench(_bench_config(config), group)
    with progress("measuring", bench.config.iterations, first) as advance:
        overlap = bench.measure(advance)
    timelines = [bench.timeline(name) for name in SCHEDULES]
    steps = {name: statistics.median(seconds[name][1:] or seconds[name]) for name in SCHEDULES}
    return {
        "config": dataclasses.asdict(config) | {"tp": dist.get_world_size()},
        "schedules": {
            name: {
                "step_seconds": steps[name],
                "speedup": steps["sync"] / steps[name],
                "tokens_per_second": config.batch * config.sequence / steps[name],
                "hidden": overlap["schedules"][name]["hidden"],
                "of_ideal": overlap["schedules"][name]["of_ideal"],
                "losses": losses[name],
                "validation_loss": validation[name],
            }
            for name in SCHEDULES
        },
        "largest_loss_difference": max(
            abs(a - b) / abs(a) for a, b in zip(losses["sync"], losses["oases"], strict=True)
        ),
        "overlap": overlap,
        "timelines": timelines,
    }


def _bench_config(config: TrainConfig) -> OverlapConfig:
    sizes = {name: getattr(config, name) for name in ("hidden", "layers", "heads", "sequence", "batch")}
    return OverlapConfig(
        **sizes, schedules=",".join(SCHEDULES), iterations=5,
        device=config.device, seed=config.seed,
    )  # fmt: skip


def table_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Table rows, one per schedule, with the columns of HEADER."""
    return [
        (
            name, f"{1e3 * row['step_seconds']:.0f} ms", f"{row['speedup']:.2f} x",
            f"{row['tokens_per_second']:.0f}", percent(row["hidden"]), percent(row["of_ideal"]),
            f"{row['losses'][-1]:.4f}", f"{row['validation_loss']:.4f}",
        )
        for name, row in result["schedules"].items()
    ]  # fmt: skip


def void(result: dict[str, Any]) -> str:
    """Why the times mean nothing, with the remedy, or ""."""
    beyond = [
        f"{percent(row['of_ideal'])} ({name})"
        for name, row in result["schedules"].items()
        if row["of_ideal"] > _MOST_OF_IDEAL
    ]
    if not beyond:
        return ""
    return (
        f"This measurement is void: {' and '.join(beyond)} of the ideal speed were measured, which no schedule "
        "reaches. Other load on the machine has disturbed it; run the demo again on an idle machine."
    )


def show(result: dict[str, Any], link: str, folder: Path) -> None:
    """Print the table; write oases-report.html and oases-trace.json to `folder`."""
    rows = table_rows(result)
    console.print(table(HEADER, rows))
    unusable = void(result)
    title = f"oases is {result['schedules']['oases']['speedup']:.2f} x as fast as synchronous tensor parallelism"
    if unusable:
        console.print(unusable)
        title, unusable = "A void measurement: the machine was busy", f"{unusable} "
    difference = result["largest_loss_difference"]
    console.print(
        f"Losses of the two schedules differ by at most {difference:.1e}, relative, over all steps.\n'hidden' "
        "and 'of ideal' refer to the transformer stack alone, forward and backward, where the overlap happens."
    )
    timelines: Sequence[Timeline] = result["timelines"]
    config = result["config"]
    page, trace = folder / "oases-report.html", folder / "oases-trace.json"
    losses = {name: row["losses"] for name, row in result["schedules"].items()}
    write_page(
        page,
        title=title,
        subtitle=f"{unusable}{config['layers']} layers of width {config['hidden']}, batch {config['batch']} x "
        f"{config['sequence']}, {config['tp']} ranks, {link}",
        header=HEADER,
        rows=rows,
        sections=[
            Section("Where the time went", _TIMELINES, draw_timelines(timelines)),
            Section("The same training", _LOSSES, draw_curves(losses, x="step", y="training loss, nats per byte")),
        ],
    )
    write_text(trace, trace_json(timelines), "trace")
    console.print(f"Timelines: {page}   Trace for Perfetto: {trace}", soft_wrap=True)
