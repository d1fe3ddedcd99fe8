"""Predicted beside measured: profiles this machine, runs schedules and compares each step with its simulation."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from oases.bench.config import OverlapConfig
from oases.bench.overlap import OverlapBench
from oases.bench.simulated import predicted
from oases.errors import UsageError
from oases.profile.config import ProfileConfig
from oases.profile.run import Surroundings, run_profile
from oases.simulator.hardware import Hardware
from oases.terminal import progress
from oases.train.config import option

SCHEDULES = ("sync", "cross_pass", "oases")
APART = 0.05
"""Schedules whose measured times differ by more than this share of the faster must be ordered rightly."""


@dataclass(frozen=True)
class PlannerBenchConfig:
    """Which steps are predicted and measured."""

    links: str = option("500mbit,1gbit", "links to shape, joined by commas")
    shapes: str = option(
        "768x3x256x4,512x4x256x8,1024x2x128x8", "HIDDENxLAYERSxSEQUENCExBATCH of the models, joined by commas"
    )
    schedules: str = option(",".join(SCHEDULES), "schedules, joined by commas")
    iterations: int = option(5, "interleaved repetitions; medians are compared")

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
                config.check(2)
                found.append(config)
        return found

    def link_rates(self) -> list[str]:
        """The links, one by one."""
        return [rate.strip() for rate in self.links.split(",") if rate.strip()]


def run_planner_bench(
    config: PlannerBenchConfig, around: Surroundings, show_progress: bool
) -> tuple[list[dict[str, Any]], Hardware]:
    """Profile and measure every shape behind the link at hand; to be called by every rank.

    Each shape is measured right after its blocks were profiled, as machines drift.
    """
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
        known = run_profile(profile, replace(around, known=known), show_progress)
        for each in both:
            bench = OverlapBench(each, group)
            with progress(_named(each), each.iterations, show_progress and dist.get_rank() == 0) as advance:
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
    return runs, known


def _named(config: OverlapConfig) -> str:
    return f"hidden {config.hidden}, recompute {config.recompute}"


def predicted_seconds(config: OverlapConfig, name: str, hardware: Hardware, tp: int) -> float:
    """What the simulator says of a schedule of an overlap benchmark."""
    return predicted(config, config.contestant(name)[0], hardware, tp).total_seconds


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
