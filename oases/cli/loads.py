"""Command `loads`: replay a trace of expert loads under several placement methods."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oases.cli.options import add_options, command, config_from, require_writable, write_json


def add(commands: Any) -> None:
    """Add the command."""
    from oases_train.load_replay import LoadsConfig

    loads = command(commands, "loads")
    loads.add_argument("trace", help="trace file of oases train --record-loads")
    loads.add_argument("--html", metavar="FILE", help="write a page with loads, balance, replicas and time saved")
    add_options(loads, LoadsConfig())
    loads.set_defaults(run=_loads)


def _loads(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.terminal import console, table
    from oases_train.load_replay import HEADER, LoadsConfig, compare_placements, table_rows, write_loads

    require_writable("--html", options.html)
    result = compare_placements(options.trace, config_from(LoadsConfig, options))
    console.print(
        f"{result['steps']} steps of {result['layers']} layers: {result['experts']} experts on {result['devices']} "
        "ranks; seconds are modelled, mean over steps", soft_wrap=True,
    )  # fmt: skip
    console.print(table(HEADER, table_rows(result)))
    if options.html is not None:
        write_loads(Path(options.html), result)
        console.print(f"written to {options.html}", soft_wrap=True)
    write_json(options.json, result)
