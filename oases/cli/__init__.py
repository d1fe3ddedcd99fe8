"""The command `oases` and its subcommands. Every one takes --json FILE; invalid input exits with code 2."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from oases import __version__
from oases.cli.options import COMMANDS, Parser, command, fail, require_writable, result_output
from oases.core.schedule import ScheduleError
from oases.errors import ExtensionError, UsageError

_COMPLETION = "--print-completion"


class _Version(argparse.Action):
    """Print the versions of oases and torch. `oases.report()` ends with what the extension was built with."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"oases {__version__} (torch {version('torch')})")  # torch itself takes seconds to import
        parser.exit()


class _Completion(argparse.Action):
    """Print a shell completion script."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *__: Any) -> NoReturn:
        try:
            import shtab
        except ImportError as error:
            raise UsageError(f"{_COMPLETION} needs the package shtab; pip install shtab") from error
        _complete_paths(parser, shtab)
        print(shtab.complete(parser, shell))
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (a rank failed) or 2 (invalid input)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser(given).parse_args(given)
        require_writable("--json", options.json)
        with result_output(options.json):
            options.run(options, given)
    except (UsageError, ScheduleError, ExtensionError) as error:
        fail(str(error))
    except OSError as error:  # an invalid path: too long, in a folder without permission, on a full disk
        fail(f"{error.filename!r}: {error.strerror}" if error.filename else error.strerror or str(error))


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser. Imports the module of the given command only: `oases --help` needs no torch."""
    parser = Parser(prog="oases", description="Overlapped tensor parallelism for PyTorch.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of oases and torch, and exit")
    parser.add_argument(
        _COMPLETION, action=_Completion, choices=("bash", "zsh"),
        help=f'print a completion script, and exit; for bash: eval "$(oases {_COMPLETION} bash)"',
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    asked = [name for name in given[:1] if name in COMMANDS]
    if asked or any(argument.startswith(_COMPLETION) for argument in given[:1]):
        for module in dict.fromkeys(COMMANDS[name].module for name in asked or COMMANDS):
            importlib.import_module(module).add(commands)
    else:
        for name in COMMANDS:
            command(commands, name)
    return parser


def _complete_paths(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Complete options that take a path, known by their metavar, with paths."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_paths(inner, shtab)
        elif any(kind in str(action.metavar) for kind in ("FILE", "PATH", "DIR")):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
