"""Steps of blocks of experts under every way of placing them, beside what their costs say, with skewed and even load.

Compute is emulated by sleeps in proportion to the tokens (`oases_bench.timed_block`), so more ranks than cores can
run; tokens, parameters and gradients are really sent. The link is measured first; the planner gets these costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import RenderableType
from torch import Tensor, nn

from oases.errors import UsageError
from oases.execution.group import scheduler_of
from oases.kernels.permute import histogram
from oases.moe.cost_measurement import handling_seconds
from oases.moe.costs import Costs
from oases.moe.experts import ExpertWeights
from oases.moe.layer import OverlappedMoE
from oases.moe.placement import Integers, make_placement, owner_ranks
from oases.moe.router import Router, Routing
from oases.moe.stack import ExpertStack
from oases.moe.traces import generate
from oases.terminal import progress, table
from oases.train.config import option, settings
from oases.train.load_replay import METHODS, PLACEMENT_METHODS, PlacementMethod, rb
from oases.train.model_options import require_bytes
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
from oases_bench.timed_block import sleep_until


class ForcedRouter(Router):
    """Router with prescribed choices. Weights are its gates of the chosen experts."""

    counts: Tensor | None = None
    """int64 [E]: slots of the next call for each expert; they sum up to T k. None: the router's own choice."""

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> Routing:
        """See `Router`."""
        if self.counts is None:
            return super().forward(x, bias=bias)
        slots = torch.arange(self.num_experts).repeat_interleave(self.counts)
        # Side by side in this order a token would meet one expert several times; a column is one k-th of the slots.
        experts = slots.view(self.top_k, len(x)).t().contiguous()
        gates = (x.float() @ self.weight.float().t()).softmax(-1)
        weights = gates.gather(1, experts)
        demand = histogram(experts, self.num_experts)
        return Routing(experts, weights, demand, demand, None, None, None, ~weights.isfinite().all())


class TimedMoE(OverlappedMoE):
    """OverlappedMoE whose experts take `token_seconds` a token forward, and `backward` times that backward."""

    def __init__(self, *sizes: int, token_seconds: float, backward: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.token_seconds, self.backward_times = token_seconds, backward
        self.router.__class__ = ForcedRouter

    def compute(self, rows: Tensor, counts: list[int], weights: ExpertWeights) -> Tensor:
        """rows * the mean of the first numbers of each expert's weights, after the wait."""
        seconds = self.token_seconds * len(rows)
        result: Tensor = _Timed.apply(rows, seconds, self.backward_times * seconds, counts, *weights.given)
        return result


class TimedExpertBlock(nn.Module):
    """A block for an `ExpertStack`: a wait in the place of attention, then timed experts."""

    def __init__(self, experts: TimedMoE, non_expert_seconds: float, backward: float) -> None:
        super().__init__()
        self.experts = experts
        self.gain = nn.Parameter(torch.ones(1))
        self.seconds, self.backward_times = non_expert_seconds, backward

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The wait."""
        x = _Timed.apply(x, self.seconds, self.backward_times * self.seconds, [len(x)], self.gain)
        return x, x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual."""
        return x + y


class _Timed(torch.autograd.Function):
    """rows times a number of each weight, as long as it is told to take."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, forward: float, backward: float, counts: list[int], *weights: Tensor
    ) -> Tensor:
        start = time.perf_counter()
        gain = torch.stack([weight.flatten()[:1].mean() for weight in weights]).mean() if len(weights[0]) else 1.0
        ctx.seconds, ctx.gain = backward, gain
        ctx.save_for_backward(*weights)
        y = rows * gain
        sleep_until(start + forward)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        start = time.perf_counter()
        found = [torch.zeros_like(weight) for weight in ctx.saved_tensors]
        y = grad * ctx.gain
        sleep_until(start + ctx.seconds)
        return y, None, None, None, *found


_BACKWARD = 2.0
"""Seconds of a backward pass, in forward passes."""
_LOADS = ("skewed", "even")
_TIMES = 5


ABLATION = {
    "planner": PlacementMethod("prophet", "blocking", False),
    "planner + scheduler": PlacementMethod("prophet", "block_wise", False),
}
"""Parts of `prophet`; the third part is the coupling of both."""


@dataclass(frozen=True)
class ExpertsBenchConfig(BenchConfig):
    """The blocks, their loads, and the device that compute is emulated for."""

    methods: str = option(",".join(METHODS), f"placements to measure, of {', '.join(METHODS)}, comma-separated")
    ablation: bool = option(True, "the parts of prophet one by one, too")
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

    def contestants(self) -> dict[str, PlacementMethod]:
        """By name. UsageError for an unknown one."""
        found = {name: PLACEMENT_METHODS[name] for name in self.parse_list("methods", METHODS)}
        return found | (ABLATION if self.ablation else {})

    def loads(self, ranks: int, kind: str) -> Iterator[list[Integers]]:
        """Yield, for each step, each block's counts [expert, rank]."""
        slots = self.tokens * self.top_k
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
    """The waits, the link as all-to-alls of two sizes find it, and what a layer has to do besides."""
    group = dist.group.WORLD
    assert group is not None
    scheduler, ranks = scheduler_of(group), dist.get_world_size()

    def seconds(rows: int) -> float:
        going = torch.zeros(rows * ranks * config.hidden)
        coming, splits = torch.empty_like(going), [rows * config.hidden] * ranks

        def exchange() -> None:
            scheduler.wait(scheduler.all_to_all(coming, going, splits, splits, "measuring"))

        return statistics.median([timed_step(exchange) for _ in range(_TIMES + 1)][1:])

    rows = max(1, config.tokens * config.top_k // ranks)
    small, large = seconds(1), seconds(rows)
    numbers: list[Any] = [small, large]
    dist.broadcast_object_list(numbers, 0)
    small, large = numbers
    sent = (ranks - 1) * rows * config.hidden * 4
    link = Costs(
        token_seconds=0.0,
        token_bytes=4 * config.hidden,
        expert_bytes=config.expert_bytes,
        bandwidth=sent / max(large - small, 0.1 * large),
        latency=small,
        backward=_BACKWARD,
    )
    besides = _Run(config, PLACEMENT_METHODS["none"], link)  # computes nothing
    for _ in range(_TIMES + 1):
        besides.step(next(config.loads(ranks, "even")))
    numbers = [statistics.median(besides.seconds[1:]) - besides.modelled[-1]]
    dist.broadcast_object_list(numbers, 0)
    weights = besides.blocks[0].experts.experts.weights
    return replace(
        link,
        token_seconds=config.token_us / 1e6,
        non_expert_seconds=config.non_expert_ms / 1e3,
        handling_seconds=handling_seconds(weights, link, group, "measuring"),
        fixed_seconds=max(0.0, numbers[0]) / config.blocks,
    )


def run_experts_bench(config: ExpertsBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, which the experts are spread over. Called on every rank."""
    named, size = checked_settings(config), dist.get_world_size()
    costs = measured_costs(config)
    result: Result = {"config": named | {"ranks": size}, "costs": settings(costs)}
    errors = []
    rounds = config.warmup + config.iterations
    with progress("steps", len(_LOADS) * rounds, shows and first_rank()) as advance:
        for at, kind in enumerate(_LOADS):
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
        for kind in _LOADS
        for name, row in (*result[kind].items(), *parts.get(kind, {}).items())
    ]  # fmt: skip
    yield table(_COLUMNS, rows, words=2)


BENCHMARK = Benchmark(
    "moe",
    "blocks of experts, placed in every way, with skewed and with even load",
    ExpertsBenchConfig(),
    run_experts_bench,
    shown,
    size=8,
)
