"""Tables of a campaign, for the terminal and as a dated report."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from oases.profile.run import device_name
from reliability.campaign.faults import Fault, lost_steps
from reliability.campaign.runs import STEPS
from reliability.campaign.sessions import KINDS, WORLDS, Session

COLUMNS = ("fault", "number", "while saving", "median s", "worst s", "over 30 s", "steps lost")
WORLD_COLUMNS = ("run", "sessions", "faults", "restarts' median s", "worst s", "stuck", "differences", "left behind")
"""Restarts: faults after which ranks were started anew."""


def hits(sessions: Iterable[Session]) -> list[Fault]:
    """Faults that hit a run."""
    return [fault for session in sessions for fault in session.hits()]


def rows_by_kind(sessions: Sequence[Session]) -> list[tuple[str, ...]]:
    """Row of COLUMNS for every kind of fault that hit, and for all."""
    found = hits(sessions)
    kinds = [kind for kind in KINDS if any(fault.kind == kind for fault in found)]
    return [
        _row(kind, [fault for fault in found if kind in (fault.kind, "all")]) for kind in [*kinds, "all"] if found
    ]


def _row(kind: str, faults: Sequence[Fault]) -> tuple[str, ...]:
    seconds = [fault.seconds or 0.0 for fault in faults]
    saving = sum(fault.hit_while_saving for fault in faults)
    share = f"{saving} ({100 * saving / len(faults):.0f} %)"
    late, lost = sum(each > 30 for each in seconds), sum(map(lost_steps, faults))
    return kind, f"{len(faults)}", share, *_times(faults), f"{late}", f"{lost}"


def _times(faults: Sequence[Fault]) -> tuple[str, str]:
    """Median and worst seconds, "-" without faults."""
    seconds = [fault.seconds or 0.0 for fault in faults]
    return (f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("-", "-")


def rows_by_world(sessions: Sequence[Session]) -> list[tuple[str, ...]]:
    """Row of WORLD_COLUMNS for every world that was played."""
    rows = []
    for world in WORLDS:
        own = [session for session in sessions if session.world == world]
        wrong = [kind for session in own for kind, _ in session.wrong]
        if own:
            restarts = [fault for fault in hits(own) if KINDS[fault.kind].ends]
            wrongs = [str(wrong.count(kind)) for kind in ("stuck", "difference", "left")]
            rows.append((world, f"{len(own)}", f"{len(hits(own))}", *_times(restarts), *wrongs))
    return rows


def summary(sessions: Sequence[Session]) -> str:
    """Sentence of the whole campaign."""
    bad = sum(bool(session.wrong) for session in sessions)
    return f"{len(hits(sessions))} faults in {len(sessions)} sessions, {bad} of which went wrong"


def write_report(file: Path, sessions: Sequence[Session], command: str) -> None:
    """Write a report in Markdown."""
    machine = f"{os.cpu_count()} cores of {device_name('cpu')}, torch {torch.__version__}, gloo"
    wrong = [f"- session {s.number} ({s.world}): {text}" for s in sessions for _, text in s.wrong]
    lines = [
        f"# Fault campaign: {len(hits(sessions))} faults",
        "",
        f"`{command}`, {time.strftime('%Y-%m-%d')}. {machine}.",
        "",
        f"{summary(sessions)}. A session is a run of {STEPS} steps that meets faults at random moments and is",
        "started again when its launcher has ended; its losses and weights are compared to the bit with those of an",
        "undisturbed run, after a start with other degrees within float32's rounding. Seconds run from the fault, or",
        "the end of one that lasts, to the next step; those of a restart, to the first of the new ranks.",
        "",
        *_markdown(COLUMNS, rows_by_kind(sessions)),
        "",
        *_markdown(WORLD_COLUMNS, rows_by_world(sessions)),
        "",
        *(wrong or ["No session was stuck, differed, lost a step or left a process or file behind."]),
        "",
    ]
    file.write_text("\n".join(lines))


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
