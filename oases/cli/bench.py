"""The command bench: what is hidden on this machine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
from oases.errors import UsageError


def add(commands: Any) -> None:
    """Add it to the command line."""
    from oases.bench.experts import ExpertsBenchConfig
    from oases.bench.host import HostBenchConfig
    from oases.bench.mixture import MixtureBenchConfig
    from oases.bench.nodes import NodesBenchConfig
    from oases.bench.overlap import OverlapConfig
    from oases.bench.pipeline import PipelineBenchConfig
    from oases.bench.placements import PlacementsBenchConfig
    from oases.bench.planner import PlannerBenchConfig
    from oases.bench.plans import PlansBenchConfig
    from oases.bench.recomputation import RecomputationBenchConfig
    from oases.bench.sparse_config import SparseBenchConfig
    from oases.bench.svm_config import SvmBenchConfig

    bench = command(commands, "bench", "measure what is hidden on this machine")
    benches = bench.add_subparsers(required=True, metavar="BENCHMARK", parser_class=Parser)
    overlap = command(benches, "overlap", "schedules beside compute alone and communication alone, interleaved")
    add_options(overlap, OverlapConfig(), only_given=True)
    add_ranks(overlap, link=None)
    overlap.add_argument("--simulate", metavar="PROFILE", help="predict every step too, from this profile")
    overlap.add_argument("--html", metavar="FILE", help="with --simulate: draw measured and predicted steps there")
    overlap.set_defaults(run=_bench_overlap)
    host = command(benches, "host", "CPU time that the executor adds to a model, above plain autograd")
    add_options(host, HostBenchConfig())
    host.set_defaults(run=_bench_host)
    planner = command(benches, "planner", "steps as the simulator predicts them beside steps as they are measured")
    add_options(planner, PlannerBenchConfig())
    add_ranks(planner, link=None)
    planner.add_argument("--profile", metavar="FILE", help="write the profile that was measured there")
    planner.add_argument("--part", action="store_true", help=argparse.SUPPRESS)  # of a run over several links
    planner.set_defaults(run=_bench_planner)
    plans = command(benches, "plans", "every feasible plan of a small model measured, beside the planner's choice")
    add_options(plans, PlansBenchConfig())
    add_ranks(plans, link=None, tp=4)
    plans.set_defaults(run=_bench_plans)
    pipeline = command(benches, "pipeline", "pipeline schedules measured beside their simulation, a stage on a rank")
    add_options(pipeline, PipelineBenchConfig())
    add_ranks(pipeline, link=None, tp=4)
    pipeline.set_defaults(run=_bench_pipeline)
    nodes = command(benches, "nodes", "a step over several nodes in all three ways of cutting, beside torch's own")
    add_options(nodes, NodesBenchConfig())
    add_ranks(nodes, link=None, tp=8)
    nodes.set_defaults(run=_bench_nodes, nodes=2)
    again = command(benches, "recomputation", "stages that recompute what does not fit: how even, and what it saves")
    add_options(again, RecomputationBenchConfig())
    add_ranks(again, link=None, tp=4)
    again.set_defaults(run=_bench_recomputation)
    moe = command(benches, "moe", "blocks of experts, placed in every way, with skewed and with even load")
    add_options(moe, ExpertsBenchConfig())
    add_ranks(moe, link=None, tp=8)
    moe.set_defaults(run=_bench_moe)
    mixture = command(benches, "mixture", "a GPT with experts, trained on real text under every placement")
    add_options(mixture, MixtureBenchConfig())
    add_ranks(mixture, link=None)
    mixture.set_defaults(run=_bench_mixture)
    placements = command(benches, "placements", "placements of experts by their modelled time, beside the optimum")
    add_options(placements, PlacementsBenchConfig())
    placements.add_argument(
        "--published", action="store_true", help="model the speed-ups of Pro-Prophet's evaluation instead"
    )
    placements.set_defaults(run=_bench_placements)
    sparse = command(benches, "sparse", "training with large embeddings: what each way of averaging sends and learns")
    add_options(sparse, SparseBenchConfig())
    add_ranks(sparse, link=None)
    sparse.set_defaults(run=_bench_sparse)
    svm = command(benches, "svm", "nonconvex penalised SVMs beside reweighted linear programmes, LinearSVC and skglm")
    add_options(svm, SvmBenchConfig())
    svm.set_defaults(run=_bench_svm)
    gpu = command(
        benches, "gpu", "one GPU: kernels beside its copy bandwidth, and what a simulated link leaves exposed"
    )
    gpu.add_argument("--report", metavar="FILE", help="write a dated Markdown report there")
    gpu.set_defaults(run=_bench_gpu)


def _bench_overlap(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.overlap import OverlapConfig, run_overlap_bench
    from oases.launch.ranks import run_ranks
    from oases.terminal import console, overlap_table

    config = configured(OverlapConfig, options)
    if config.model is not None:
        from oases.bench.layers import of_model

        if options.simulate is not None:
            raise UsageError(f"--simulate {options.simulate} knows the built-in GPT alone; leave it out, or --model")
        config = of_model(config, list(vars(options)), options.tp)
    config.check(options.tp)
    if options.simulate is not None:
        _bench_simulated(config, options, given)
        return
    if options.html is not None:
        raise UsageError(f"--html {options.html} draws measured steps beside predicted ones; give --simulate PROFILE")
    link = behind_link(options, given)
    console.print(f"{options.tp} ranks {link}")
    result = run_ranks(run_overlap_bench, (config, True), rank_options(options, config.device))
    if not speaks():
        return
    result["config"] |= {"link": options.link, "nodes": options.nodes}
    console.print(overlap_table(result))
    write_json(options.json, result)


def _bench_host(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.host import HostBenchConfig, host_table, run_host_bench
    from oases.terminal import console

    require_writable("--json", options.json)
    result = run_host_bench(configured(HostBenchConfig, options))
    console.print(host_table(result))
    write_json(options.json, result)


def _bench_simulated(config: Any, options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.simulated import check, run_simulated_bench, write_comparison
    from oases.launch.ranks import run_ranks
    from oases.simulator.hardware_file import read_hardware
    from oases.terminal import console, overlap_table, predictions_table

    require_writable("--html", options.html)
    hardware = read_hardware(Path(options.simulate))
    check(config, hardware, options.tp)
    link = behind_link(options, given)
    console.print(f"{options.tp} ranks {link}")
    result, steps = run_ranks(run_simulated_bench, (config, hardware, True), rank_options(options, config.device))
    if not speaks():
        return
    result["config"] |= {"link": options.link, "nodes": options.nodes, "profile": hardware.name}
    console.print(overlap_table(result))
    console.print(predictions_table(result))
    if options.html is not None:
        write_comparison(Path(options.html), result, steps, hardware)
        console.print(f"written to {options.html}", soft_wrap=True)
    write_json(options.json, result)


def _bench_planner(options: argparse.Namespace, given: Sequence[str]) -> None:
    """With --link behind that link; without, behind each of --links in turn, in a process of its own."""
    from oases.bench.planner import PlannerBenchConfig, compare, run_planner_bench
    from oases.launch.ranks import run_ranks
    from oases.profile.run import Surroundings
    from oases.simulator.hardware_file import write
    from oases.terminal import console, planner_table

    require_writable("--profile", options.profile)
    config = configured(PlannerBenchConfig, options)
    config.models()
    if options.link is None and options.backend == "gloo":
        runs = [run for rate in config.link_rates() for run in _planned_behind(rate, options, given)]
    else:
        joined = behind_link(options, given)
        console.print(f"{options.tp} ranks {joined}")
        ranks = rank_options(options, "cpu")
        around = Surroundings(joined, True, ranks.backend.alone)
        runs, hardware = run_ranks(run_planner_bench, (config, around, True), ranks)
        if options.profile is not None and speaks():
            write(hardware, options.profile)
    if not speaks():
        return
    result = compare(runs)
    if not options.part:
        console.print(planner_table(result))
    write_json(options.json, result)


def _planned_behind(rate: str, options: argparse.Namespace, given: Sequence[str]) -> list[dict[str, Any]]:
    """The runs of this command behind one link, run by a process that can go behind it."""
    if options.profile is not None:
        raise UsageError("--profile keeps the profile of one link; give that link with --link")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.json"
        command = [sys.executable, "-m", "oases", *given, "--link", rate, "--part", "--json", str(path)]
        ended = subprocess.run(command, check=False)
        if ended.returncode != 0:
            sys.exit(ended.returncode)
        found: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    return found


def _bench_plans(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.plans import PlansBenchConfig, run_plans_bench
    from oases.launch.ranks import run_ranks
    from oases.terminal import console, percent

    config = configured(PlansBenchConfig, options)
    config.model()
    joined = behind_link(options, given)
    console.print(f"{options.tp} ranks {joined}; compute is emulated, what is sent is sent")
    ranks = rank_options(options, "cpu")
    shaped = options.link is not None or ranks.backend.name == "sim"
    result = run_ranks(run_plans_bench, (config, shaped, True), ranks)
    if not speaks():
        return
    choice, best = result["choice"], result["best"]
    console.print(
        f"{result['num_feasible']} of {result['num_plans']} plans fit {result['budget_bytes'] / 2**20:.0f} MiB\n"
        f"choice  {1e3 * choice['seconds']:.0f} ms (predicted {1e3 * choice['predicted_seconds']:.0f}): "
        f"{choice['plan']}\nbest    {1e3 * best['seconds']:.0f} ms: {best['plan']}\n"
        f"the choice takes {result['choice_over_best']:.3f} of the best; best uniform plans: "
        + ", ".join(f"tp {tp} {1e3 * s:.0f} ms" for tp, s in result["best_uniform_seconds"].items())
        + f"; predictions are off by {percent(result['median_error'])} (median)", soft_wrap=True,
    )  # fmt: skip
    write_json(options.json, result)


def _bench_pipeline(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.pipeline import PipelineBenchConfig, run_pipeline_bench
    from oases.terminal import pipelines_table

    config = configured(PipelineBenchConfig, options)
    config.chosen(options.tp)
    said = "{} stages {}; compute is emulated, what is sent is sent"
    _on_ranks(run_pipeline_bench, config, options, given, said, pipelines_table)


def _bench_moe(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.experts import ExpertsBenchConfig, run_experts_bench
    from oases.terminal import experts_table

    config = configured(ExpertsBenchConfig, options)
    config.check(options.tp)
    said = "{} ranks {}; compute is emulated, what is sent is sent"
    _on_ranks(run_experts_bench, config, options, given, said, experts_table)


def _bench_mixture(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.mixture import MixtureBenchConfig, run_mixture_bench
    from oases.terminal import mixture_table

    config = configured(MixtureBenchConfig, options)
    config.check(options.tp)
    _on_ranks(run_mixture_bench, config, options, given, "{} ranks {}", mixture_table)


def _on_ranks(
    run: Callable[..., Any],
    config: Any,
    options: argparse.Namespace,
    given: Sequence[str],
    said: str,
    table: Callable[[dict[str, Any]], Any],
) -> None:
    """Run a benchmark on ranks behind the link asked for, and show it. said: with places for number and link."""
    from oases.launch.ranks import run_ranks
    from oases.terminal import console

    console.print(said.format(options.tp, behind_link(options, given)))
    result = run_ranks(run, (config, True), rank_options(options, "cpu"))
    if not speaks():
        return
    result["config"] |= {"link": options.link, "nodes": options.nodes}
    console.print(table(result))
    write_json(options.json, result)


def _bench_nodes(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.nodes import NodesBenchConfig, run_nodes_bench
    from oases.launch.ranks import run_ranks
    from oases.terminal import console, nodes_table

    config = configured(NodesBenchConfig, options)
    config.check(options.tp, options.nodes)
    joined = behind_link(options, given)
    console.print(f"{config.text()} {joined}; compute is emulated, what is sent is sent", soft_wrap=True)
    result = run_ranks(run_nodes_bench, (config, options.nodes, True), rank_options(options, "cpu"))
    if not speaks():
        return
    result["config"] |= {"link": options.link}
    console.print(nodes_table(result))
    write_json(options.json, result)


def _bench_recomputation(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.recomputation import RecomputationBenchConfig, run_recomputation_bench
    from oases.launch.ranks import run_ranks
    from oases.terminal import console, nodes_table

    config = configured(RecomputationBenchConfig, options)
    plans = config.plans(options.tp)
    joined = behind_link(options, given)
    console.print(f"{options.tp} stages {joined}; memory is that of training, compute is emulated", soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.txt"
        length = 4 * next(iter(plans.values())).model.sequence * config.micro_batches
        data.write_text("any text does. " * length)
        result = run_ranks(run_recomputation_bench, (config, str(data), True), rank_options(options, "cpu"))
    if not speaks():
        return
    console.print(nodes_table(result))
    write_json(options.json, result)


def _bench_placements(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.placements import PlacementsBenchConfig, run_placements_bench
    from oases.moe.published import report
    from oases.terminal import console, placements_table, speedups_table

    config = configured(PlacementsBenchConfig, options)
    require_writable("--json", options.json)
    if options.published:
        result = report()
        console.print(speedups_table(result))
    else:
        result = run_placements_bench(config)
        console.print(placements_table(result))
    write_json(options.json, result)


def _bench_sparse(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.sparse import run_sparse_bench
    from oases.bench.sparse_config import SparseBenchConfig
    from oases.launch.ranks import run_ranks
    from oases.terminal import console, sparse_table

    config = configured(SparseBenchConfig, options)
    if options.tp < 2:
        raise UsageError(f"--tp {options.tp} averages nothing; give at least 2 data-parallel ranks")
    require_writable("--json", options.json)
    joined = behind_link(options, given)
    console.print(f"{options.tp} data-parallel ranks {joined}")
    shaped = options.link is not None and options.nodes == 1
    result = run_ranks(run_sparse_bench, (config, shaped, True), rank_options(options, "cpu"))
    if not speaks():
        return
    result["config"] |= {"link": options.link, "nodes": options.nodes}
    console.print(sparse_table(result))
    for name, speed in (result["nonzeros_per_second"] or {}).items():
        console.print(f"{name}: {speed / 1e6:.0f} million non-zeros per second, encoded and decoded on one core")
    write_json(options.json, result)


def _bench_svm(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.svm import run_svm_bench
    from oases.bench.svm_config import SvmBenchConfig
    from oases.terminal import console, svm_tables

    result = run_svm_bench(configured(SvmBenchConfig, options))
    for table in svm_tables(result):
        console.print(table)
    if result["missing"]:
        console.print(f"not installed, left out: {', '.join(result['missing'])}; pip install 'oases[svm-bench]'")
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
