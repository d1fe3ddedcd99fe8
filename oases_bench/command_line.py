"""Command lines of benchmarks: subcommands of `oases bench`, and stand-alone scripts."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from oases.cli.options import (
    Parser,
    add_options,
    add_ranks,
    command,
    config_from,
    enter_link,
    fail,
    is_first_rank,
    make_rank_options,
    require_writable,
    result_output,
    write_json,
)
from oases.core.schedule import ScheduleError
from oases.errors import UsageError
from oases.launch.ranks import run_ranks
from oases.terminal import console
from oases_bench.harness import Benchmark, Ranks

BENCHMARKS = (
    "overlap", "loss", "host", "pipeline", "nodes", "plans", "moe", "loads", "sparse", "collectives", "svm", "gpu",
)  # fmt: skip
"""Modules of oases_bench that define a BENCHMARK, in the order of the help."""


def add(benches: Any) -> None:
    """Add every benchmark to the subcommands of `oases bench`."""
    for name in BENCHMARKS:
        benchmark: Benchmark = importlib.import_module(f"oases_bench.{name}").BENCHMARK
        _add_benchmark(command(benches, name, benchmark.help), benchmark, None)


def script(benchmark: Benchmark, path: str) -> None:
    """Run the command line of a stand-alone benchmark, `python PATH`."""
    parser = Parser(prog=f"python {path}", description=benchmark.help + ".")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - = to standard output")
    _add_benchmark(parser, benchmark, path)
    given = sys.argv[1:]
    try:
        options = parser.parse_args(given)
        require_writable("--json", options.json)
        with result_output(options.json):
            options.run(options, given)
    except (UsageError, ScheduleError) as error:
        fail(str(error))


def _add_benchmark(parser: argparse.ArgumentParser, benchmark: Benchmark, path: str | None) -> None:
    add_options(parser, benchmark.config, only_given=True)
    if benchmark.size is not None:
        add_ranks(parser, link=None, tp=benchmark.size)
    parser.set_defaults(run=lambda options, given: _run(benchmark, options, given, path), nodes=benchmark.nodes)


def _run(benchmark: Benchmark, options: argparse.Namespace, given: Sequence[str], path: str | None) -> None:
    """Run a benchmark, on ranks behind --link if it needs ranks, and print its result."""
    config = config_from(type(benchmark.config), options)
    for name in ("html", "report"):
        require_writable(f"--{name}", getattr(config, name, None))
    if benchmark.size is None:
        result = benchmark.run(config.prepared(Ranks(1)), True)
    else:
        ranks = Ranks(options.tp, options.nodes, options.link, options.backend, frozenset(vars(options)))
        config = config.prepared(ranks)
        options.link = options.link or config.least_link
        joined = enter_link(options, given, script=path)
        console.print(config.described().format(options.tp, joined), soft_wrap=True)
        of = make_rank_options(options, getattr(config, "device", "cpu"))
        result = run_ranks(benchmark.run, (config, ranks, True), of)
        if not is_first_rank():
            return
        result["config"] |= {"link": options.link, "nodes": options.nodes}
    for each in benchmark.shown(result):
        console.print(each, soft_wrap=isinstance(each, str))
    write_json(options.json, result)
