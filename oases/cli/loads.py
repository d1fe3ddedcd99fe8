"""The command that shows a trace of experts' loads: what each way of placing them would have made of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oases.cli.options import add_options, command, config_from, require_writable, write_json


def add(commands: Any) -> None:
    """Add it to the command line."""
    from oases.train.load_replay import LoadsConfig

    loads = command(commands, "loads")
    loads.add_argument("trace", help="the file with the loads")
    loads.add_argument("--html", metavar="FILE", help="draw loads, balance, copies and time saved as a page there")
    add_options(loads, LoadsConfig())
    loads.set_defaults(run=_loads)


def _loads(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.terminal import console, table
    from oases.train.load_replay import HEADER, LoadsConfig, compare_placements, table_rows, write_loads

    require_writable("--html", options.html)
    result = compare_placements(options.trace, config_from(LoadsConfig, options))
    console.print(
        f"{result['steps']} steps of {result['layers']} layers: {result['experts']} experts on {result['devices']} "
        "ranks; seconds are modelled, a mean over the steps", soft_wrap=True,
    )  # fmt: skip
    console.print(table(HEADER, table_rows(result)))
    if options.html is not None:
        write_loads(Path(options.html), result)
        console.print(f"drawn in {options.html}", soft_wrap=True)
    write_json(options.json, result)
