"""Command `check`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from oases.cli.options import command, write_json
from oases.terminal import console, working

_WAYS = ("oases", "ddp", "fsdp2", "tp_plan")


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(commands, "check")
    parser.add_argument(
        "function", metavar="SCRIPT:FUNCTION", help="returns (model, batch); the batch is a dict or tuple"
    )
    parser.add_argument(
        "--with", dest="way", default="oases", metavar="WAY",
        help=f"how to shard: {', '.join(_WAYS)}, or SCRIPT:FUNCTION, which gets the model and returns it "
        "(default: oases)",
    )  # fmt: skip
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="tensor-parallel ranks (default: 2)")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel ranks (default: 1)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="training steps (default: 2)")
    parser.add_argument("--eval", action="store_true", help="call eval() on the model: no dropout")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="X", help="seconds until a hang is ended (default: 300)"
    )
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace, given: Sequence[str]) -> None:
    """Check, print, and exit with 1 where something differs."""
    from oases_check import CheckReport
    from oases_check.case import Case, FromScript, Item
    from oases_check.ranks import check_case
    from oases_check.ways import Way

    made = FromScript.parse(options.function)
    batch = Item(made, 1)
    way = Way(options.way, options.dp, options.tp, batch) if options.way in _WAYS else FromScript.parse(options.way)
    case = Case(Item(made, 0), way, batch, options.steps, options.tp, options.dp, training=not options.eval)
    with working("one process and its ranks"):
        report = CheckReport(*check_case(case, options.timeout))
    for each in report.shown():
        console.print(each, soft_wrap=isinstance(each, str))
    write_json(options.json, report.as_json())
    if not report.equal:
        sys.exit(1)
