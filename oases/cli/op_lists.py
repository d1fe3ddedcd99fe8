"""Command `simulate` for a schedule without a model: blocks, experts or stages, with a time per kind of op."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oases.cli.options import write_json
from oases.core.schedule import GENERATORS, Schedule, Unit, format_schedule
from oases.core.schedule.validate import SORTS
from oases.errors import UsageError
from oases.files import write_text
from oases.plans.expert_schedules import EXPERT_SCHEDULES, resolve_experts
from oases.plans.schedule_files import read_schedule
from oases.simulator import Timeline, simulate
from oases.simulator.quantities import seconds_text

COSTS: dict[Unit, dict[str, float]] = {
    "block": {
        "F": 10.0, "C": 1.0, "R": 10.0, "BC": 1.0, "B": 10.0, "W": 10.0, "all_reduce": 10.0, "reduce_scatter": 5.0,
        "all_gather": 5.0, "all_to_all": 5.0,
    },
    "experts": {"D": 10.0, "E": 10.0, "F": 0.0, "P": 1.0, "all_to_all": 5.0, "share": 5.0, "join": 5.0},
    "stage": {"F": 10.0, "R": 10.0, "B": 20.0, "send": 1.0},
}  # fmt: skip
"""Default milliseconds by kind of op. B of a stage includes weight gradients."""
BLOCKS = 4
"""Default number of blocks of a named expert schedule."""
MOST_SPANS = 12_000
"""Maximum spans of a page or a text."""
_READ = (
    "Pale red: compute waits for exposed communication. Grey: it waits for another stage (pipeline bubble). "
    "Drag to zoom, hover for names and times."
)
_LETTERS: dict[Unit, str] = {
    "block": "F forward, C combine, E experts, R recompute, B backward, W weight gradients, . waits, = on the link",
    "experts": "D before, E in, F behind experts, P placement, R recompute, B backward, . waits, = on the link",
    "stage": "F forward, R recompute, B backward, W weight gradients, . waits",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of a schedule without a model."""
    group = parser.add_argument_group(
        "a schedule without a model",
        "With --schedule FILE, a schedule file of any kind, or --schedule with the name of an expert schedule. No "
        "model and no cluster: every block, or stage, takes the given times.",
    )
    group.add_argument(
        "--costs", metavar="KIND=MS,...",
        help="milliseconds by kind of op, such as F=10,B=20,all_reduce=8 or D=4,E=9,all_to_all=3,share=2",
    )  # fmt: skip
    group.add_argument("--blocks", type=int, metavar="N", help=f"number of MoE blocks (default: {BLOCKS})")


def names_list(schedule: str | None) -> bool:
    """Whether a schedule is simulated without a model. UsageError where it is neither a name nor a file."""
    if schedule is None or schedule in GENERATORS:
        return False
    if schedule not in EXPERT_SCHEDULES and not Path(schedule).is_file():
        raise UsageError(
            f"--schedule {schedule!r} is unknown; known are {', '.join(GENERATORS)}, expert "
            f"schedules {', '.join(EXPERT_SCHEDULES)}, and the path of a schedule file"
        )
    return True


def simulate_list(options: argparse.Namespace) -> None:
    """Simulate the schedule of `--schedule`, print it and write the requested files."""
    from oases.terminal import console

    schedule = _schedule(options)
    costs = COSTS[schedule.unit] | _given(options.costs, schedule)
    if "W" in costs and schedule.unit == "stage" and not schedule.has_weight_passes:
        raise UsageError(f"--costs W: schedule {schedule.name} has no op W; include weight gradients in B")
    timeline = simulate(schedule, {kind: milliseconds / 1e3 for kind, milliseconds in costs.items()})
    if schedule.unit == "stage":
        timeline = replace(timeline, who="stage")
    result = result_of(schedule, costs, timeline)
    console.print(f"{_title(schedule)}: a step takes {seconds_text(timeline.total_seconds)}", soft_wrap=True)
    console.print("ms by kind of op: " + ", ".join(f"{kind} {value:g}" for kind, value in costs.items()))
    for row in result["ranks"]:
        console.print(
            f"{timeline.who} {row['rank']}: computes {seconds_text(row['busy_seconds'])}, exposed "
            f"{seconds_text(row['exposed_seconds'])}, bubble {seconds_text(row['bubble_seconds'])}",
            soft_wrap=True,
        )
    if len(timeline.spans) <= MOST_SPANS:
        console.print(timeline.text(max(20, console.width - 20), links=schedule.unit != "stage"), soft_wrap=True)
        console.print(_LETTERS[schedule.unit])
    _write(options, schedule, timeline, result)
    write_json(options.json, result)


def result_of(schedule: Schedule, costs: dict[str, float], timeline: Timeline) -> dict[str, Any]:
    """Result as plain data: seconds in all and by rank, or by stage, and the schedule's text."""
    return {
        "name": schedule.name,
        "unit": schedule.unit,
        "blocks": schedule.num_blocks,
        "sub_batches": schedule.num_sub_batches,
        "stages": schedule.num_stages,
        "recompute": schedule.recompute,
        "costs_ms": costs,
        "step_seconds": timeline.total_seconds,
        "ranks": [
            {
                "rank": rank,
                "busy_seconds": timeline.busy(rank, "compute"),
                "exposed_seconds": timeline.exposed(rank),
                "bubble_seconds": timeline.bubble(rank),
            }
            for rank in range(schedule.num_stages)
        ],
        "list": format_schedule(schedule),
    }


def _title(schedule: Schedule) -> str:
    if schedule.unit == "stage":
        chunks = f" with {schedule.chunks} model chunks each" if schedule.chunks > 1 else ""
        return f"{schedule.name}, {schedule.num_stages} stages{chunks}, {schedule.num_sub_batches} micro-batches"
    cut = f" in {schedule.num_sub_batches} sub-batches" if schedule.num_sub_batches > 1 else ""
    return f"{schedule.name}, {schedule.num_blocks} {SORTS[schedule.unit]}{cut}, recompute {schedule.recompute}"


def _schedule(options: argparse.Namespace) -> Schedule:
    name, blocks = options.schedule, options.blocks
    if blocks is not None and blocks < 1:
        raise UsageError(f"--blocks must be at least 1, got {blocks}")
    if name not in EXPERT_SCHEDULES:
        if options.recompute is not None:
            raise UsageError(f"--recompute: the schedule in {name} sets recomputation; leave it out")
        return read_schedule(name, None, num_blocks=blocks)
    if options.recompute not in (None, "none", "full"):
        raise UsageError(f"--recompute {options.recompute!r}: an expert schedule takes none or full")
    return resolve_experts(name, BLOCKS if blocks is None else blocks, options.recompute == "full")


def _given(text: str | None, schedule: Schedule) -> dict[str, float]:
    """Parse --costs: milliseconds by kind of op."""
    known = [*COSTS[schedule.unit], *(["W"] if schedule.unit == "stage" else [])]
    found: dict[str, float] = {}
    for item in text.split(",") if text else []:
        kind, _, value = (part.strip() for part in item.partition("="))
        try:
            found[kind] = float(value)
        except ValueError as error:
            raise UsageError(f"--costs {item.strip()!r} is not KIND=MILLISECONDS, such as {known[0]}=10") from error
        if kind not in known:
            raise UsageError(f"--costs {kind}: ops of {SORTS[schedule.unit]} that have costs are {', '.join(known)}")
        if not 0 <= found[kind] < 3.6e6:
            raise UsageError(f"--costs {kind} must be from 0 ms up to an hour, got {value}")
    return found


def _write(options: argparse.Namespace, schedule: Schedule, timeline: Timeline, result: dict[str, Any]) -> None:
    from oases.terminal import console

    if options.trace is not None:
        from oases.simulator.timeline import trace_json

        write_text(options.trace, trace_json([timeline]), "--trace")
        console.print(f"written to {options.trace}", soft_wrap=True)
    if options.html is None:
        return
    if len(timeline.spans) > MOST_SPANS:
        raise UsageError(f"--html: {len(timeline.spans)} spans are too many for a page; use --trace")
    from oases.simulator.drawing import Section, draw_timelines, write_page

    rows: Sequence[dict[str, Any]] = result["ranks"]
    names = ("busy_seconds", "exposed_seconds", "bubble_seconds")
    write_page(
        Path(options.html),
        title=f"A simulated step of {schedule.name}: {seconds_text(timeline.total_seconds)}",
        subtitle=f"{_title(schedule)}. Simulated with a time per kind of op, not measured.",
        header=(timeline.who, "compute", "exposed communication", "bubble"),
        rows=[(str(row["rank"]), *(seconds_text(row[name]) for name in names)) for row in rows],
        sections=[Section("Where the time goes", _READ, draw_timelines([timeline]))],
    )
    console.print(f"written to {options.html}", soft_wrap=True)
