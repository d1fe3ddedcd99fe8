"""The command bench: what is hidden on this machine. The benchmarks are a package of their own, `oases_bench`."""

from __future__ import annotations

from typing import Any

from oases.cli.options import Parser, command


def add(commands: Any) -> None:
    """Add it to the command line."""
    import oases_bench.command_line

    bench = command(commands, "bench")
    oases_bench.command_line.add(bench.add_subparsers(required=True, metavar="BENCHMARK", parser_class=Parser))
