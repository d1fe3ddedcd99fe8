"""The command `oases` and its subcommands. Every one takes --json FILE; mistakes exit with 2."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from oases import __version__
from oases.cli.options import Parser, fail, require_writable
from oases.errors import UsageError
from oases.schedule import ScheduleError


class _Version(argparse.Action):
    """Prints what was built, which only the extension knows, when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from oases.build import described

        print(f"oases {__version__} ({described()})")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (a rank failed) or 2 (a mistake in what was given)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser(given).parse_args(given)
        require_writable("--json", options.json)
        options.run(options, given)
    except (UsageError, ScheduleError) as error:
        fail(str(error))
    except OSError as error:  # a path that cannot be: too long, behind a locked folder, on a full disk
        fail(f"{error.filename!r}: {error.strerror}" if error.filename else str(error))


_COMMANDS = {
    "demo": "train",
    "train": "train",
    "bench": "bench",
    "loads": "loads",
    "profile": "profile",
    "plan": "plan",
    "simulate": "simulate",
}
"""The module of each command, in the order of the help."""


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command given, or of all: what needs torch is imported only where it is asked for."""
    parser = Parser(prog="oases", description="Overlapped tensor parallelism for PyTorch.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and what was built, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    asked = given[0] if given else ""
    for module in dict.fromkeys([_COMMANDS[asked]] if asked in _COMMANDS else _COMMANDS.values()):
        importlib.import_module(f"oases.cli.{module}").add(commands)
    return parser
