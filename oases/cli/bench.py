"""Command `bench`. The benchmarks are a separate package, `oases_bench`."""

from __future__ import annotations

from typing import Any

from oases.cli.options import Parser, command


def add(commands: Any) -> None:
    """Add the command."""
    import oases_bench.command_line

    bench = command(commands, "bench")
    oases_bench.command_line.add(bench.add_subparsers(required=True, metavar="BENCHMARK", parser_class=Parser))
