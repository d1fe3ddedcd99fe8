"""The page that shows what a run hid: a table, the measured timelines and the loss curves, in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from oases.simulator.drawing import draw_curves, draw_timelines
from oases.simulator.page import Section, write_page
from oases.simulator.timeline import Timeline

_TIMELINES = (
    "One measured step of the transformer stack under each schedule, to one time scale. Orange: an all-reduce is on "
    "the link. Pale: the compute stands still for it. Names are BLOCK.SUB-BATCH. Drag to zoom, hover for names and "
    "times."
)
_LOSSES = (
    "Training loss per step. A schedule changes when things run, never what is computed, so the curves lie on each "
    "other."
)


def write_report(
    path: Path,
    *,
    title: str,
    subtitle: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    timelines: Sequence[Timeline],
    losses: Mapping[str, Sequence[float]],
) -> None:
    """Write a self-contained page to `path`; it loads nothing from anywhere.

    header, rows: the table of results. losses: training loss per step, nats per byte, by schedule.
    """
    curves = draw_curves(losses, x="step", y="training loss, nats per byte")
    write_page(
        path, title=title, subtitle=subtitle, header=header, rows=rows,
        sections=[
            Section("Where the time went", _TIMELINES, draw_timelines(timelines)),
            Section("The same training", _LOSSES, curves),
        ],
    )  # fmt: skip
