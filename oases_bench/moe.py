"""Steps of blocks of experts under every way of placing them, beside what their costs say, with skewed, recorded and
even load.

Compute is emulated by sleeps in proportion to the tokens (`oases_bench.timed_block`), so more ranks than cores can
run; tokens, parameters and gradients are really sent. The link is measured first; the planner gets these costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import RenderableType

from oases.errors import UsageError
from oases.models.options import require_bytes
from oases.moe.cost_measurement import measure_costs
from oases.moe.costs import Costs
from oases.moe.layer import OverlappedMoE
from oases.moe.placement import Integers, make_placement, owner_ranks
from oases.moe.stack import ExpertStack
from oases.terminal import progress, table
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
from oases_bench.loads import PLACEMENT_METHODS, PlacementMethod, generate, rb, read_loads
from oases_bench.timed_experts import ForcedRouter, TimedExpertBlock, TimedMoE
from oases_train.config import option


def _rescaled(counts: Integers, slots: int) -> Integers:
    """Counts [expert, rank] in proportion, with a sum of `slots` for each rank; even for a rank without any."""
    parts = np.where(counts.sum(0) == 0, 1, counts).astype(np.float64)
    exact = parts * (slots / parts.sum(0))
    found = np.floor(exact).astype(np.int64)
    for rank, missing in enumerate((slots - found.sum(0)).tolist()):
        found[np.argsort(found[:, rank] - exact[:, rank], kind="stable")[:missing], rank] += 1
    return found


_BACKWARD = 2.0
"""Seconds of a backward pass, in forward passes."""
_TIMES = 5

ABLATION = {
    "planner": PlacementMethod("prophet", "blocking", False),
    "planner + scheduler": PlacementMethod("prophet", "block_wise", False),
}
"""Parts of `prophet`; the third part is the coupling of both."""


@dataclass(frozen=True)
class ExpertsBenchConfig(BenchConfig):
    """The blocks, their loads, and the device that compute is emulated for."""

    methods: str = option(
        ",".join(PLACEMENT_METHODS), f"placements to measure, of {', '.join(PLACEMENT_METHODS)}, comma-separated"
    )
    trace: str | None = option(
        None,
        "also measure the loads of a training's last steps, recorded by oases train --record-loads",
        metavar="FILE",
    )
    ablation: bool = option(False, "the parts of prophet one by one, too")
    blocks: int = option(4, "blocks of experts")
    experts: int = option(16, "experts of a block")
    hidden: int = option(256, "hidden size, features")
    intermediate: int = option(1024, "intermediate size of an expert, features")
    tokens: int = option(512, "tokens of a rank")
    top_k: int = option(2, "experts per token")
    token_us: float = option(40.0, "microseconds that an expert computes on a token, forward")
    non_expert_ms: float = option(20.0, "milliseconds between two blocks of experts, forward")
    concentration: float = option(0.3, "of the skewed loads: the smaller, the fewer experts take most")
    drift: float = option(0.05, "how fast skewed loads change, in logits a step")
    copies: int = option(-1, "copies that fit on a rank; -1 for no limit")
    warmup: int = option(3, "steps in front, in which loads are learnt")
    iterations: int = option(5, "interleaved repetitions")
    seed: int = option(0, "of the loads")

    def prepared(self, ranks: Ranks) -> ExpertsBenchConfig:
        """See `BenchConfig`."""
        self.check(ranks.size)
        return self

    def described(self) -> str:
        """See `BenchConfig`."""
        return "{} ranks {}; compute is emulated, communication is real"

    def check(self, ranks: int) -> None:
        """Raise UsageError for an invalid configuration, before any rank starts."""
        sizes = ("blocks", "experts", "hidden", "intermediate", "tokens", "top_k", "iterations", "warmup")
        self.require_least(1, *sizes)
        if not 0 < self.token_us <= 1e6 or not 0 <= self.non_expert_ms <= 1e5:
            raise UsageError(
                f"--token-us must be above 0 and at most 1e6, --non-expert-ms at most 1e5, got {self.token_us} and "
                f"{self.non_expert_ms}"
            )
        if self.top_k > self.experts:
            raise UsageError(f"--top-k {self.top_k} is more than the {self.experts} experts")
        owner_ranks(self.experts, ranks)
        size = 2 * 2 * 4 * self.blocks * self.experts * self.hidden * self.intermediate
        sent = 4 * ranks * self.tokens * self.top_k * self.hidden
        require_bytes(
            {"experts (--blocks, --experts, --hidden, --intermediate)": size, "tokens (--tokens, --top-k)": sent},
            f"{self.blocks} blocks of {self.experts} experts",
        )
        self.contestants()
        if self.trace is not None:
            self.recorded(ranks)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of loads."""
        return ("skewed", *(() if self.trace is None else ("recorded",)), "even")

    def recorded(self, ranks: int) -> list[list[Integers]]:
        """Each block's counts [expert, rank] in the trace's last steps, by step, for this number of tokens.

        Blocks have the trace's layers in turns. UsageError for a trace of other sizes, or too few steps.
        """
        assert self.trace is not None
        loads, steps = list(read_loads(self.trace).values()), self.warmup + self.iterations
        where = f"--trace {self.trace}"
        experts, devices = next(iter(loads[0].values())).shape
        if (experts, devices) != (self.experts, ranks):
            raise UsageError(
                f"{where} has {experts} experts on {devices} ranks; give --experts {experts} and as many ranks"
            )
        if len(loads) < steps:
            raise UsageError(f"{where} has {len(loads)} steps; lower --warmup and --iterations, together {steps}")
        found = []
        for by_layer in loads[-steps:]:
            layers = [_rescaled(counts, self.tokens * self.top_k) for counts in by_layer.values()]
            found.append([layers[block % len(layers)] for block in range(self.blocks)])
        return found

    def contestants(self) -> dict[str, PlacementMethod]:
        """By name. UsageError for an unknown one."""
        found = {name: PLACEMENT_METHODS[name] for name in self.parse_list("methods", PLACEMENT_METHODS)}
        return found | (ABLATION if self.ablation else {})

    def loads(self, ranks: int, kind: str) -> Iterator[list[Integers]]:
        """Yield, for each step, each block's counts [expert, rank]."""
        slots = self.tokens * self.top_k
        if kind == "recorded":
            yield from self.recorded(ranks)
            return
        if kind == "even":
            base = np.full((self.experts, ranks), slots // self.experts, dtype=np.int64)
            base[: slots % self.experts] += 1
            while True:
                yield [base] * self.blocks
        steps = self.warmup + self.iterations + 1
        blocks = [
            generate(
                experts=self.experts, devices=ranks, tokens=slots, steps=steps, concentration=self.concentration,
                drift=self.drift, seed=self.seed + number,
            )
            for number in range(self.blocks)
        ]  # fmt: skip
        yield from map(list, zip(*blocks, strict=True))

    def memory_budget(self) -> float | None:
        """Bytes of the copies that fit."""
        return None if self.copies < 0 else float(self.copies * self.expert_bytes)

    @property
    def expert_bytes(self) -> int:
        """Parameters of an expert."""
        return 2 * 4 * self.hidden * self.intermediate


class _Run:
    """One contestant under one kind of load on this rank."""

    def __init__(self, config: ExpertsBenchConfig, who: PlacementMethod, costs: Costs) -> None:
        self.config = config
        blocks = []
        for number in range(config.blocks):
            layer = TimedMoE(
                config.hidden, config.intermediate, config.experts, top_k=config.top_k, placement=who.method,
                costs=replace(costs, scheduled=who.coupled, leading=number == 0), name=f"block {number}",
                memory_budget=config.memory_budget(), token_seconds=costs.token_seconds, backward=_BACKWARD,
            )  # fmt: skip
            blocks.append(TimedExpertBlock(layer, costs.non_expert_seconds, _BACKWARD))
        self.blocks = blocks
        taken = replace(costs, scheduled=who.schedule == "block_wise")
        self.costs = [replace(taken, leading=number == 0) for number in range(config.blocks)]
        self.stack = ExpertStack(blocks, schedule=who.schedule)
        self.seconds: list[float] = []
        self.modelled: list[float] = []
        self.before: list[float] = []
        self.after: list[float] = []
        self.copies: list[float] = []

    def step(self, loads: list[Integers]) -> None:
        """One step, timed from when every rank has begun to when the slowest has ended."""
        rank = dist.get_rank()
        for block, counts in zip(self.blocks, loads, strict=True):
            router = block.experts.router
            assert isinstance(router, ForcedRouter)
            router.counts = torch.from_numpy(counts[:, rank].copy())
        x = torch.ones(self.config.tokens, self.config.hidden)
        self.seconds.append(timed_step(lambda: self.stack(x).mean().backward()))
        self.stack.zero_grad()
        layers = 0.0
        for block, costs, counts in zip(self.blocks, self.costs, loads, strict=True):
            done = block.experts.last
            assert done is not None
            found = make_placement(
                done.placement.method, counts, costs, (done.placement.routes, done.placement.copies)
            )
            layers += found.predicted_seconds + (1 + _BACKWARD) * costs.non_expert_seconds
            self.before.append(done.balance_degree_at_home)
            self.after.append(done.balance_degree)
            self.copies.append(sum(map(len, done.placement.copies)))
        self.modelled.append(layers)

    def forget(self) -> None:
        """Discard the warm-up steps."""
        for held in (self.seconds, self.modelled, self.before, self.after, self.copies):
            held.clear()

    def row(self) -> dict[str, Any]:
        """Result row; seconds are of rank 0."""
        before, after = statistics.mean(self.before), statistics.mean(self.after)
        errors = [modelled / seconds - 1 for modelled, seconds in zip(self.modelled, self.seconds, strict=True)]
        return {
            "step_seconds": statistics.median(self.seconds),
            "modelled_seconds": statistics.median(self.modelled),
            "prediction_error": statistics.median(errors),
            "balance_degree": after,
            "rb": rb(before, after),
            "copies": statistics.mean(self.copies),
            "steps": self.seconds,
        }


def measured_costs(config: ExpertsBenchConfig) -> Costs:
    """The link and copies as layers measure them for their planner, the waits, and what a layer has to do besides.

    The last is by how much steps of even load take longer than the rest says, waits included: arithmetic that a wait
    is long enough for takes no time of its own.
    """
    group = dist.group.WORLD
    assert group is not None
    layer = OverlappedMoE(config.hidden, config.intermediate, config.experts, top_k=config.top_k, placement="none")
    costs = replace(
        measure_costs(layer.experts.weights, config.tokens, layer.compute, group, "measuring"),
        token_seconds=config.token_us / 1e6,
        non_expert_seconds=config.non_expert_ms / 1e3,
        backward=_BACKWARD,
    )
    besides = _Run(config, PLACEMENT_METHODS["none"], costs)
    for _ in range(_TIMES + 1):
        besides.step(next(config.loads(dist.get_world_size(), "even")))
    longer: list[Any] = [statistics.median(besides.seconds[1:]) - besides.modelled[-1]]
    dist.broadcast_object_list(longer, 0)
    return replace(costs, fixed_seconds=max(0.0, longer[0]) / config.blocks)


def run_experts_bench(config: ExpertsBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, which the experts are spread over. Called on every rank."""
    named, size = checked_settings(config), dist.get_world_size()
    costs = measured_costs(config)
    result: Result = {"config": named | {"ranks": size}, "costs": asdict(costs)}
    errors = []
    rounds = config.warmup + config.iterations
    with progress("steps", len(config.kinds) * rounds, shows and first_rank()) as advance:
        for at, kind in enumerate(config.kinds):
            runs = {name: _Run(config, who, costs) for name, who in config.contestants().items()}
            loads = config.loads(size, kind)
            for done in range(rounds):
                now = next(loads)
                for run in runs.values():
                    if done == config.warmup:
                        run.forget()
                    run.step(now)
                advance(at * rounds + done + 1)
            rows = {name: run.row() for name, run in runs.items()}
            add_speedups(rows.get("none"), rows.values())
            errors += [abs(row["prediction_error"]) for row in rows.values()]
            result[kind] = {name: row for name, row in rows.items() if name in PLACEMENT_METHODS}
            if config.ablation:
                result.setdefault("ablation", {})[kind] = {n: row for n, row in rows.items() if n in ABLATION}
    result["prediction_error"] = max(errors)
    return result


_COLUMNS = ("load", "placement", "step", "modelled", "error", "speedup", "balance degree", "RB", "copies")


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per placement and load, what it is made of below."""
    parts = result.get("ablation", {})
    rows = [
        (
            kind, name, milliseconds(row["step_seconds"]), milliseconds(row["modelled_seconds"]),
            signed_percent(row["prediction_error"]), times(row.get("speedup")), f"{row['balance_degree']:.0f}",
            f"{row['rb']:.2f}", f"{row['copies']:.1f}",
        )
        for kind in ("skewed", "recorded", "even")
        if kind in result
        for name, row in (*result[kind].items(), *parts.get(kind, {}).items())
    ]  # fmt: skip
    yield table(_COLUMNS, rows, words=2)


BENCHMARK = Benchmark(
    "moe",
    "blocks of experts, placed in every way, with skewed, recorded and even load",
    ExpertsBenchConfig(),
    run_experts_bench,
    shown,
    size=8,
)
