"""Training steps of a GPT with experts on real text under every placement, interleaved: all compute is real.

Natural skew is what the router comes to by itself, with no loss that would have it spread tokens. Forced skew adds a
bias to its gates that falls with the number of the expert, so the first ranks' experts take most. Even load is a
bias that undoes the router's own preferences, as loss-free balancing moves it, before the steps that count. What is
computed is the same under every placement, so the losses have to be the same. Costs are measured once, by the first
trainer that plans, for all of them. A placement that is named twice is trained twice, which shows how far apart
trainers are that do the same. Predicted: the step without copies, as measured, plus what the layers of experts are
modelled to take longer by or less.

    python benchmarks/mixture.py --link 1gbit
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import RenderableType

from oases.errors import UsageError
from oases.models.moe_gpt import MoEGPT
from oases.moe.costs import Costs
from oases.moe.placement import make_placement, owner_only, owner_ranks
from oases.moe.state import MoEStatistics
from oases.terminal import progress, table
from oases_bench.command_line import script
from oases_bench.harness import (
    BenchConfig,
    Benchmark,
    Ranks,
    Result,
    add_speedups,
    checked_settings,
    first_rank,
    milliseconds,
    signed_percent,
    timed_step,
    times,
)
from oases_bench.loads import METHODS, rb
from oases_train.config import TrainConfig, option
from oases_train.trainer import Trainer

LOADS = ("natural", "forced", "even")


@dataclass(frozen=True)
class MixtureBenchConfig(BenchConfig):
    """The model, how it is skewed, and what is compared."""

    methods: str = option(",".join(METHODS), f"placements to measure, of {', '.join(METHODS)}, comma-separated")
    loads: str = option(",".join(LOADS), f"skews to measure, of {', '.join(LOADS)}, comma-separated")
    layers: int = option(2, "layers of attention and experts")
    hidden: int = option(128, "hidden size, features")
    heads: int = option(4, "attention heads")
    sequence: int = option(256, "tokens of a sample")
    batch: int = option(16, "samples of a step, on all ranks")
    experts: int = option(8, "experts of a layer")
    expert_hidden: int = option(1024, "intermediate size of an expert, features")
    top_k: int = option(2, "experts per token")
    skew: float = option(0.3, "difference that a forced skew makes between the first expert's gate and the last's")
    warmup: int = option(6, "steps in front, in which loads and costs are learnt")
    iterations: int = option(10, "interleaved repetitions")
    data: str = option("", "text file or folder; default: Python's own sources")
    seed: int = option(0, "of the weights and the order of the data")

    def prepared(self, ranks: Ranks) -> MixtureBenchConfig:
        """See `BenchConfig`."""
        self.check(ranks.size)
        return self

    def check(self, ranks: int) -> None:
        """Raise UsageError for an invalid configuration, before any rank starts."""
        self.require_least(1, "warmup", "iterations")
        if not self.skew >= 0:
            raise UsageError(f"--skew must be at least 0, got {self.skew}")
        self.parse_list("methods", METHODS)
        self.parse_list("loads", LOADS)
        owner_ranks(self.experts, ranks)
        self.training("none")

    def training(self, placement: str) -> TrainConfig:
        """Training configuration with a placement, without load-balancing losses."""
        return TrainConfig(
            layers=self.layers, hidden=self.hidden, heads=self.heads, sequence=self.sequence, batch=self.batch,
            experts=self.experts, expert_hidden=self.expert_hidden, top_k=self.top_k, placement=placement,
            balance_weight=0.0, data=self.data or None, seed=self.seed, steps=self.warmup + self.iterations,
        )  # fmt: skip


class _Run:
    """A run under one placement on this rank."""

    def __init__(self, config: MixtureBenchConfig, method: str, load: str) -> None:
        self.trainer = Trainer(config.training(method))
        model = self.trainer.model
        assert isinstance(model, MoEGPT)
        self.layers = model.layers
        self._even = load == "even"
        for layer in self.layers:
            falling = torch.linspace(1, 0, config.experts)
            layer.router.bias = config.skew * falling if load == "forced" else torch.zeros(config.experts)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.degrees: list[tuple[float, float]] = []
        self.copies: list[float] = []
        self.modelled: list[float] = []
        """Seconds of the layers of experts above those without copies."""

    def step(self, counts: bool, known: list[Costs]) -> None:
        """A training step, and what the layers did in it.

        counts: False for one in front. known: costs by layer, or empty: this run measures them, if it plans.
        """
        for layer, costs in zip(self.layers, known, strict=False):
            layer.costs = costs
        seconds = timed_step(lambda: self.losses.append(self.trainer.step()))
        done = [layer.last for layer in self.layers]
        if self._even:
            for layer, step in zip(self.layers, done, strict=True):
                assert step is not None
                demand = torch.from_numpy(step.counts.sum(1)).double()
                assert layer.router.bias is not None
                layer.router.bias += (0.02 * (1 - demand / demand.mean())).float().clamp(-0.02, 0.02)
        if not counts:
            return
        self.seconds.append(seconds)
        self.modelled.append(sum(map(_saved, done, known)))
        for step in done:
            assert step is not None
            self.degrees.append((step.balance_degree_at_home, step.balance_degree))
            self.copies.append(float(sum(map(len, step.placement.copies))))

    @property
    def costs(self) -> list[Costs]:
        """Costs by layer, once they were measured."""
        return [layer.costs for layer in self.layers if layer.costs is not None]

    def row(self) -> dict[str, Any]:
        """Result row; seconds are of rank 0."""
        before, after = (statistics.mean(of) for of in zip(*self.degrees, strict=True))
        return {
            "step_seconds": statistics.median(self.seconds),
            "balance_degree": after,
            "rb": rb(before, after),
            "copies": statistics.mean(self.copies),
            "loss": self.losses[-1],
            "steps": self.seconds,
            "modelled": self.modelled,
        }


def _saved(step: MoEStatistics | None, costs: Costs) -> float:
    """Modelled seconds of a layer's step, less those without copies: below 0 where they help."""
    assert step is not None
    chosen = step.placement.routes, step.placement.copies
    with_copies, without = (
        make_placement("", step.counts, costs, each) for each in (chosen, owner_only(step.counts))
    )
    return with_copies.predicted_seconds - without.predicted_seconds


def run_mixture_bench(config: MixtureBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group. Called on every rank."""
    result: Result = {"config": checked_settings(config) | {"ranks": dist.get_world_size()}}
    loads, steps = config.parse_list("loads", LOADS), config.warmup + config.iterations
    methods, known = config.parse_list("methods", METHODS), list[Costs]()
    with progress("steps", len(loads) * steps, shows and first_rank()) as advance:
        for at, load in enumerate(loads):
            names = [
                method if at == methods.index(method) else f"{method}, again" for at, method in enumerate(methods)
            ]
            runs = {name: _Run(config, method, load) for name, method in zip(names, methods, strict=True)}
            order = deque(runs.values())
            for done in range(steps):
                for run in order:
                    run.step(done >= config.warmup, known)
                    known = known or run.costs
                order.rotate(1)  # what runs before a step has a part in how long it takes
                advance(at * steps + done + 1)
            result[load] = _rows(runs)
    result["costs"] = [asdict(costs) for costs in known]
    return result


def _rows(runs: dict[str, _Run]) -> dict[str, Any]:
    rows = {name: run.row() for name, run in runs.items()}
    add_speedups(rows.get("none"), rows.values())
    for row in rows.values() if "none" in rows else ():
        row["predicted_seconds"] = rows["none"]["step_seconds"] + statistics.median(row["modelled"])
        row["prediction_error"] = row["predicted_seconds"] / row["step_seconds"] - 1
    losses = next(iter(runs.values())).losses
    for name, run in runs.items():
        rows[name]["loss_difference"] = max(abs(a - b) for a, b in zip(run.losses, losses, strict=True))
    return rows


_COLUMNS = (
    "load", "placement", "step", "predicted", "speedup", "balance degree", "RB", "copies", "loss", "differs by",
)  # fmt: skip


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per skew and placement."""
    rows = [
        (
            load, name, milliseconds(row["step_seconds"]),
            signed_percent(row["prediction_error"]) if "prediction_error" in row else "-",
            times(row.get("speedup")), f"{row['balance_degree']:.0f}",
            f"{row['rb']:.2f}", f"{row['copies']:.1f}", f"{row['loss']:.4f}", f"{row['loss_difference']:.1e}",
        )
        for load in LOADS
        for name, row in result.get(load, {}).items()
    ]  # fmt: skip
    yield table(_COLUMNS, rows, words=2)


BENCHMARK = Benchmark(
    "mixture",
    "a GPT with experts, trained on real text under every placement",
    MixtureBenchConfig(),
    run_mixture_bench,
    shown,
)

if __name__ == "__main__":
    script(BENCHMARK, __file__)
