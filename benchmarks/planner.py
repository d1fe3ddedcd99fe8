"""Predicted beside measured: profiles this machine, runs schedules and compares each step with its simulation.

python benchmarks/planner.py                # behind each of --links in turn, 17 minutes
python benchmarks/planner.py --link 1gbit --profile profile.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import RenderableType

from oases.cli.options import require_writable, result_output, write_json
from oases.errors import UsageError
from oases.profile.config import OverlapConfig, ProfileConfig
from oases.profile.overlap import OverlapBench
from oases.profile.run import Surroundings, run_profile
from oases.simulator import simulate
from oases.simulator.hardware import Hardware
from oases.simulator.hardware_file import write
from oases.terminal import console, percent, progress, table
from oases.testbed import with_nodes
from oases_bench.command_line import script
from oases_bench.harness import BenchConfig, Benchmark, Ranks, Result, first_rank, milliseconds, signed_percent
from oases_bench.overlap_predictions import costs_of, model_of
from oases_train.config import option

SCHEDULES = ("sync", "cross_pass", "oases")
APART = 0.05
"""Schedules whose measured times differ by more than this share of the faster must be ordered rightly."""


@dataclass(frozen=True)
class PlannerBenchConfig(BenchConfig):
    """Steps to predict and measure."""

    links: str = option("500mbit,1gbit", "links to shape, comma-separated")
    shapes: str = option(
        "768x3x256x4,512x4x256x8,1024x2x128x8", "HIDDENxLAYERSxSEQUENCExBATCH of the models, comma-separated"
    )
    schedules: str = option(",".join(SCHEDULES), "schedules, comma-separated")
    iterations: int = option(5, "interleaved repetitions; medians are compared")
    profile: str | None = option(None, "write the profile that was measured there; with --link")

    def prepared(self, ranks: Ranks) -> PlannerBenchConfig:
        """See `BenchConfig`."""
        require_writable("--profile", self.profile)
        self.models()
        return self

    def models(self) -> list[OverlapConfig]:
        """A benchmark for each shape and choice of recomputation. UsageError for a shape that is none."""
        found = []
        for text in self.shapes.split(","):
            sizes = text.strip().split("x")
            if len(sizes) != 4 or not all(size.isdecimal() for size in sizes):
                raise UsageError(f"--shapes: {text!r} is not HIDDENxLAYERSxSEQUENCExBATCH, such as 768x3x256x4")
            hidden, layers, sequence, batch = map(int, sizes)
            for recompute in ("none", "full"):
                config = OverlapConfig(
                    hidden=hidden, layers=layers, sequence=sequence, batch=batch, recompute=recompute,
                    schedules=self.schedules, iterations=self.iterations,
                )  # fmt: skip
                config.require_ranks(2)
                found.append(config)
        return found


def run_planner_bench(config: PlannerBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Profile and measure every shape behind the link at hand. Called on every rank.

    Each shape is measured right after its blocks were profiled, as machines drift.
    """
    joined = (
        f"over {ranks.backend}" if ranks.link is None else f"over a link of {with_nodes(ranks.link, ranks.nodes)}"
    )
    around = Surroundings(joined, True, ranks.backend.endswith((",single_process", ",alone")))
    known: Hardware | None = None
    runs: list[dict[str, Any]] = []
    models = config.models()
    group = dist.group.WORLD
    assert group is not None
    for shape, both in itertools.groupby(models, key=lambda each: replace(each, recompute="none")):
        profile = ProfileConfig(
            hidden=shape.hidden, heads=shape.heads, sequence=shape.sequence, batch=shape.batch,
            layers=max(3, shape.layers), iterations=config.iterations,
        )  # fmt: skip
        known = run_profile(profile, replace(around, known=known), shows)
        for each in both:
            bench = OverlapBench(each, group)
            with progress(_named(each), each.iterations, shows and first_rank()) as advance:
                measured = bench.measure(advance)
            runs += [
                {
                    "link": around.joined, "hidden": each.hidden, "layers": each.layers, "sequence": each.sequence,
                    "batch": each.batch, "recompute": each.recompute, "schedule": name,
                    "measured_seconds": row["step_seconds"],
                    "predicted_seconds": predicted_seconds(each, name, known, dist.get_world_size()),
                }
                for name, row in measured["schedules"].items()
            ]  # fmt: skip
    assert known is not None
    if config.profile is not None and first_rank():
        write(known, config.profile)
    return {"config": asdict(config)} | compare(runs)


def _named(config: OverlapConfig) -> str:
    return f"hidden {config.hidden}, recompute {config.recompute}"


def predicted_seconds(config: OverlapConfig, name: str, hardware: Hardware, tp: int) -> float:
    """Simulated seconds of a schedule of an overlap benchmark."""
    schedule = config.contestant(name)[0]
    return simulate(schedule, costs_of(model_of(config), config.batch, schedule, hardware, tp)).total_seconds


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors, and the share of pairs in the right order: of one link and shape, and more than APART apart."""
    errors = [abs(run["predicted_seconds"] / run["measured_seconds"] - 1) for run in runs]
    pairs = right = 0
    cell: Callable[[dict[str, Any]], tuple[Any, ...]] = lambda run: tuple(  # noqa: E731
        run[name] for name in ("link", "hidden", "layers", "sequence", "batch")
    )
    for _, group in itertools.groupby(sorted(runs, key=cell), key=cell):
        for one, other in itertools.combinations(group, 2):
            low, high = sorted((one, other), key=lambda run: run["measured_seconds"])
            if high["measured_seconds"] > (1 + APART) * low["measured_seconds"]:
                pairs += 1
                right += high["predicted_seconds"] > low["predicted_seconds"]
    return {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "pairs": pairs,
        "pairs_ordered_right": right / pairs if pairs else 1.0,
        "runs": [dict(run) | {"error": error} for run, error in zip(runs, errors, strict=True)],
    }


_COLUMNS = ("link", "model", "recompute", "schedule", "measured", "predicted", "error")


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per step."""
    rows = []
    for run in result["runs"]:
        sizes = "x".join(str(run[name]) for name in ("hidden", "layers", "sequence", "batch"))
        measured, simulated = run["measured_seconds"], run["predicted_seconds"]
        rows.append(
            (
                run["link"].removeprefix("over a link of "), sizes, run["recompute"], run["schedule"],
                milliseconds(measured), milliseconds(simulated), signed_percent(simulated / measured - 1),
            )
        )  # fmt: skip
    below = (
        f"error: median {percent(result['median_error'])}, worst {percent(result['worst_error'])}; of "
        f"{result['pairs']} pairs more than 5 % apart {percent(result['pairs_ordered_right'])} are in the right order"
    )
    yield table(_COLUMNS, rows, words=4, title="forward + backward, measured and simulated", below=below)


BENCHMARK = Benchmark(
    "planner",
    "steps as the simulator predicts them beside steps as they are measured",
    PlannerBenchConfig(),
    run_planner_bench,
    shown,
)


def main() -> None:
    """Measure behind --link; without, behind each of --links in turn, in a process of its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--link", "--links", "--backend", "--json", "--profile"):
        parser.add_argument(name)
    options, _ = parser.parse_known_args()
    help_asked = {"-h", "--help"} & set(sys.argv)
    if options.link is not None or options.backend is not None or options.profile is not None or help_asked:
        script(BENCHMARK, __file__)
        return
    runs: list[dict[str, Any]] = []
    for rate in (options.links or PlannerBenchConfig().links).split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "runs.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--link", rate.strip(), "--json", str(path)]
            ended = subprocess.run(command, check=False)
            if ended.returncode != 0:  # it has said why
                sys.exit(ended.returncode)
            runs += json.loads(path.read_text())["runs"]
    result = compare(runs)
    with result_output(options.json):
        for each in shown(result):
            console.print(each)
        write_json(options.json, result)


if __name__ == "__main__":
    main()
