"""The command bench: what is hidden on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oases.cli.options import (
    Parser,
    add_options,
    add_ranks,
    behind_link,
    command,
    configured,
    rank_options,
    require_writable,
    speaks,
    write_json,
)


def add(commands: Any) -> None:
    """Add it to the command line."""
    from oases.bench.overlap import OverlapConfig

    bench = command(commands, "bench", "measure what is hidden on this machine")
    benches = bench.add_subparsers(required=True, metavar="BENCHMARK", parser_class=Parser)
    overlap = command(benches, "overlap", "schedules beside compute alone and communication alone, interleaved")
    add_options(overlap, OverlapConfig())
    add_ranks(overlap, link=None)
    overlap.set_defaults(run=_bench_overlap)
    gpu = command(
        benches, "gpu", "one GPU: kernels beside its copy bandwidth, and what a simulated link leaves exposed"
    )
    gpu.add_argument("--report", metavar="FILE", help="write a dated Markdown report there")
    gpu.set_defaults(run=_bench_gpu)


def _bench_overlap(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.overlap import OverlapConfig, run_overlap_bench
    from oases.ranks import run_ranks
    from oases.terminal import console, overlap_table

    config = configured(OverlapConfig, options)
    config.check(options.tp)
    link = behind_link(options, given)
    console.print(f"{options.tp} ranks {link}")
    result = run_ranks(run_overlap_bench, (config, True), rank_options(options, config.device))
    if not speaks():
        return
    result["config"] |= {"link": options.link, "nodes": options.nodes}
    console.print(overlap_table(result))
    write_json(options.json, result)


def _bench_gpu(options: argparse.Namespace, given: Sequence[str]) -> None:
    import datetime

    from oases.bench.gpu import markdown, run_gpu_bench
    from oases.terminal import console

    require_writable("--report", options.report)
    result = run_gpu_bench(console.print)
    report = markdown(result, datetime.date.today().isoformat())
    if options.report is not None:
        Path(options.report).write_text(report)
    console.print(report)
    write_json(options.json, result)
