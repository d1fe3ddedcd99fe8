"""The command profile: what the planner and the simulator need to know of this machine, written down."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oases.cli.options import add_options, add_ranks, behind_link, command, configured, rank_options, speaks
from oases.errors import UsageError
from oases.simulator.hardware import Hardware
from oases.simulator.hardware_file import read_hardware, write


def add(commands: Any) -> None:
    """Add it to the command line."""
    from oases.profile.config import ProfileConfig

    profile = command(commands, "profile", "measure blocks, links and contention of this machine for plans")
    add_options(profile, ProfileConfig(), skip=("sub_batches", "recompute"))
    add_ranks(profile, link=None)
    profile.add_argument("--name", metavar="TEXT", help="what the profile calls this hardware")
    profile.add_argument(
        "--append", action="store_true", help="add blocks of another shape to the profile that --json names"
    )
    profile.add_argument(
        "--convert", metavar="FILE", help="measure nothing; turn a file of published block times into a profile"
    )
    profile.set_defaults(run=_profile)


def _profile(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.profile.summary import summary
    from oases.terminal import console

    if options.json is None and (options.convert is not None or options.append):
        raise UsageError(f"--{'convert' if options.convert else 'append'} needs --json FILE, where the profile is")
    hardware = read_hardware(options.convert) if options.convert is not None else _measured(options, given)
    if not speaks():
        return
    if options.name:
        hardware = replace(hardware, name=options.name)
    for part in summary(hardware):
        console.print(part, soft_wrap=isinstance(part, str))
    if options.json is None:
        console.print("Nothing was written; give --json FILE to keep the profile.")
        return
    write(hardware, options.json)
    console.print(f"written to {options.json}", soft_wrap=True)


def _measured(options: argparse.Namespace, given: Sequence[str]) -> Hardware:
    from oases.launch.ranks import run_ranks
    from oases.profile.config import ProfileConfig
    from oases.profile.run import Surroundings, require_same_device, run_profile
    from oases.terminal import console

    config = configured(ProfileConfig, options)
    config.check(options.tp)
    known = None
    if options.append and Path(options.json).is_file():
        known = read_hardware(options.json)
        require_same_device(known, config)
    joined = behind_link(options, given)
    ranks = rank_options(options, config.device)
    shaped = options.link is not None or ranks.backend.name == "sim"
    around = Surroundings(joined, shaped, ranks.backend.alone, known)
    console.print(
        f"{options.tp} ranks {joined}; blocks of tp {', '.join(map(str, config.tensor_parallel(options.tp)))}"
    )
    try:
        hardware: Hardware = run_ranks(run_profile, (config, around, True), ranks)
    except KeyboardInterrupt:  # with one process for all ranks there is no launcher to say so
        print("oases: interrupted", file=sys.stderr)
        _nothing_written(options)
        sys.exit(130)
    except SystemExit as exit:
        if exit.code != 2:  # a mistake in what was given speaks for itself
            _nothing_written(options)
        raise
    return hardware


def _nothing_written(options: argparse.Namespace) -> None:
    if options.json is not None and speaks():
        print(f"oases: nothing was written to {options.json}", file=sys.stderr)
