"""Fault campaign: runs meet kills, stops, bad links, disks and clocks, and are compared with undisturbed runs.

    python -m reliability.campaign [--faults N] [--minutes N] [--seed N] [--report FILE.md]         (make campaign)

A session is a run that meets several faults and is started again, as a scheduler would, when its launcher has ended.
Every session is a row of FOLDER/sessions-SEED.jsonl; a campaign that was cut off goes on after its last complete one,
if the sources are the same; results of others are removed.
Exit code 1 when a session differs from the undisturbed run in a bit of its losses or weights, lost a step beyond its
last checkpoint, took longer than --most-seconds to the next step, or left a process or a file behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python_tests"))

from kills import lines_of, write_corpus  # noqa: E402

from oases.terminal import console, progress, table  # noqa: E402
from reliability.campaign.faults import Fault  # noqa: E402
from reliability.campaign.report import (  # noqa: E402
    COLUMNS,
    WORLD_COLUMNS,
    hits,
    rows_by_kind,
    rows_by_world,
    summary,
    write_report,
)
from reliability.campaign.sessions import WORLDS, Plan, Session, play  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    options = _parser().parse_args(arguments)
    begin(options.folder)
    corpus = write_corpus(options.folder / "text.txt")
    rows = options.folder / f"sessions-{options.seed}.jsonl"
    sessions = [Session(**row | {"faults": [Fault(**fault) for fault in row["faults"]]}) for row in lines_of(rows)]
    plan = Plan(options.seed, options.each, _possible(options.worlds), options.most_seconds)
    end = time.monotonic() + 60 * options.minutes
    with progress("faults", options.faults, log=True, every=1) as advance:
        while len(hits(sessions)) < options.faults and time.monotonic() < end:
            session = play(len(sessions), plan, corpus, options.folder)
            sessions.append(session)
            with rows.open("a") as file:
                file.write(json.dumps(asdict(session)) + "\n")
            for _, wrong in session.wrong:
                console.print(f"session {session.number} ({session.world}): {wrong}", soft_wrap=True)
            advance(min(options.faults, len(hits(sessions))), session.world)
    console.print(table(COLUMNS, rows_by_kind(sessions), title="seconds from a fault to the next step"))
    console.print(table(WORLD_COLUMNS, rows_by_world(sessions)))
    console.print(summary(sessions))
    if options.report is not None:
        given = sys.argv[1:] if arguments is None else arguments
        write_report(options.report, sessions, f"python -m reliability.campaign {shlex.join(given)}".strip())
    return 1 if any(session.wrong for session in sessions) else 0


def begin(folder: Path) -> None:
    """Make the folder of results, or empty it where they are of other sources: those say nothing of these."""
    digest = hashlib.sha256()
    for path in sorted(
        path for tree in ("oases", "oases_train", "csrc", "reliability/campaign") for path in (ROOT / tree).rglob("*")
    ):
        if path.suffix in (".py", ".cpp", ".h", ".cu"):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    kept = folder / "sources"
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if held and not kept.is_file():
        raise SystemExit(f"{folder} holds other files than a campaign's; give a new folder")
    if held and kept.read_text() != digest.hexdigest():
        console.print(f"{folder} has results of other sources, which are removed", soft_wrap=True)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(digest.hexdigest())


def _parser() -> argparse.ArgumentParser:
    # Runs are compared to the bit, and schedules that are measured differ between runs in how sums are cut.
    os.environ.setdefault("OASES_SCHEDULE", "oases")
    parser = argparse.ArgumentParser(
        prog="python -m reliability.campaign", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--faults", type=int, default=300, metavar="N", help="faults that hit a run (default: 300)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="N", help="begin no session after this time"
    )
    parser.add_argument("--each", type=int, default=5, metavar="N", help="faults of a session (default: 5)")
    parser.add_argument(
        "--most-seconds", type=float, default=30.0, metavar="S", help="to the next step; more is a hang (default: 30)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of kinds and moments (default: 0)")
    parser.add_argument(
        "--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), metavar="NAME",
        help=f"runs, in turn (default: {', '.join(WORLDS)})",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "campaign", help="results, to go on from")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="file for a report")
    return parser


def _possible(worlds: Sequence[str]) -> list[str]:
    """Those worlds that this machine can make; says why others are left out."""
    reasons = {world: WORLDS[world].why_not() for world in worlds}
    for world, reason in reasons.items():
        if reason is not None:
            console.print(f"{world} is left out: {reason}", soft_wrap=True)
    return [world for world, reason in reasons.items() if reason is None]


if __name__ == "__main__":
    sys.exit(main())
