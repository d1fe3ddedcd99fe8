"""Benchmark `loads`: replay of a recorded trace of expert loads under several placement methods.

As in training, a step is placed from the loads of earlier steps only. Times of expert compute and communication are
modelled; nothing is executed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from oases.errors import UsageError
from oases.models.options import option
from oases.moe.costs import Costs
from oases.moe.forecast import Planner
from oases.moe.placement import Integers, make_placement, owner_only
from oases.simulator.drawing import Section, draw_curves, draw_heat_map, write_page
from oases.terminal import table
from oases.testbed.link import link_bytes_per_second
from oases_bench.harness import BenchConfig, Benchmark, Ranks, Result
from oases_train.traces import replay

METHODS = ("none", "faster_moe", "eplb", "prophet")
DIFFERENCE = 0.1
"""Standard deviation of the gates of generated devices from the common one, in logits."""


@dataclass(frozen=True)
class PlacementMethod:
    """Placement method. schedule: of its replica transfers. coupled: the search models their overlap with compute."""

    method: str
    schedule: str
    coupled: bool


PLACEMENT_METHODS = {
    "none": PlacementMethod("none", "plain", False),
    "faster_moe": PlacementMethod("faster_moe", "blocking", False),
    "eplb": PlacementMethod("eplb", "blocking", False),
    "prophet": PlacementMethod("prophet", "block_wise", True),
    "faster_moe:overlap": PlacementMethod("faster_moe", "block_wise", False),
    "eplb:overlap": PlacementMethod("eplb", "block_wise", False),
}
"""By name; `METHODS` are as their papers have them, NAME:overlap hides its transfers as `prophet` does."""

DRAWN_LAYERS = 6
"""Number of layers whose expert loads a page shows."""
HEADER = ("placement", "balance degree", "RB", "copies", "modelled", "against none")
_LOADS = (
    "Fraction of the layer's tokens per expert and step. A row that stays bright is an expert that is always busy: "
    "the other ranks wait for its rank unless it is replicated."
)
_BALANCE = "Standard deviation of the load per rank, in (token, expert) pairs, mean over layers."
_COPIES = "Expert replicas on ranks other than the owner rank, all layers."
_SAVED = "Modelled time saved per step in all layers, against no replicas."


@dataclass(frozen=True)
class LoadsConfig(BenchConfig):
    """A trace, and the model sizes and link of the cluster that it is replayed on."""

    trace: str = option("", "trace file of oases train --record-loads", metavar="FILE")
    html: str | None = option(None, "write a page with loads, balance, replicas and time saved", metavar="FILE")
    methods: str = option(
        ",".join(METHODS), f"placement methods to compare, comma-separated: {', '.join(PLACEMENT_METHODS)}"
    )
    hidden: int = option(512, "hidden size, features")
    expert_hidden: int = option(0, "intermediate size of an expert, features; 0 = 4 x hidden")
    token_us: float = option(40.0, "forward time of an expert per token, microseconds")
    non_expert_ms: float = option(0.0, "compute between MoE layers, which can hide replica transfers, milliseconds")
    link: str = option("1gbit", "link bandwidth of a rank, e.g. 500mbit, 1gbit")
    latency_us: float = option(200.0, "latency of a collective, microseconds")
    expert_memory: int = option(-1, "memory for expert replicas per rank and layer, bytes; -1 = unlimited")

    @property
    def costs(self) -> Costs:
        """Costs of one layer in float32."""
        return Costs(
            token_seconds=self.token_us / 1e6,
            token_bytes=4 * self.hidden,
            expert_bytes=2 * 4 * self.hidden * (self.expert_hidden or 4 * self.hidden),
            bandwidth=link_bytes_per_second(self.link),
            latency=self.latency_us / 1e6,
            non_expert_seconds=self.non_expert_ms / 1e3,
        )

    @property
    def names(self) -> list[str]:
        """Placements to replay, always with `none` as the baseline. UsageError for an unknown name."""
        return list(dict.fromkeys(["none", *self.parse_list("methods", PLACEMENT_METHODS)]))

    def prepared(self, ranks: Ranks) -> LoadsConfig:
        """UsageError for an invalid option, or without a trace."""
        if not self.trace:
            raise UsageError("which loads? Give --trace FILE, of oases train --record-loads FILE")
        self.require_least(1, "hidden")
        self.require_least(0, "expert_hidden")
        self.require_least(-1, "expert_memory")
        assert self.costs
        assert self.names
        return self


def rb(before: float, after: float) -> float:
    """Balance ratio RB of the Prophet paper, before over after: 1 if both are 0, infinite if only `after` is."""
    return 1.0 if before == after else before / after if after else float("inf")


@dataclass
class ReplayedPlacement:
    """Results of one placement by step: balance degrees (mean over layers), replicas, seconds (sums)."""

    balance_before: list[float] = field(default_factory=list)
    balance_after: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Means over the steps; rb: ratio of the balance degrees before and after."""
        before, after = statistics.mean(self.balance_before), statistics.mean(self.balance_after)
        return {
            "balance_degree": after,
            "rb": rb(before, after),
            "copies": statistics.mean(self.copies),
            "modelled_seconds": statistics.mean(self.seconds),
            "over_time": asdict(self),
        }


def read_loads(path: str | Path) -> dict[int, dict[int, Integers]]:
    """Read counts [expert, device] by step and layer. UsageError for an invalid or empty trace."""
    found: dict[int, dict[int, Integers]] = {}
    for step, layer, counts in replay(path):
        found.setdefault(step, {})[layer] = counts
    if not found:
        raise UsageError(f"trace {str(path)!r} holds no steps; record one with --record-loads")
    layers = set(next(iter(found.values())))
    for step, by_layer in list(found.items()):
        if set(by_layer) != layers:
            if step == max(found) and step != min(found):  # a killed run leaves an incomplete last step
                del found[step]
                continue
            raise UsageError(
                f"trace {str(path)!r}: step {step} has layers {sorted(by_layer)}, others have {sorted(layers)}"
            )
    return found


def replay_placement(loads: dict[int, dict[int, Integers]], config: LoadsConfig, name: str) -> ReplayedPlacement:
    """Replay the loads under the placement `name`."""
    who, found = PLACEMENT_METHODS[name], ReplayedPlacement()
    costs = replace(config.costs, scheduled=who.schedule == "block_wise")
    budget = None if config.expert_memory < 0 else float(config.expert_memory)
    planners = {
        layer: Planner(replace(costs, scheduled=who.coupled), who.method, budget)
        for layer in next(iter(loads.values()))
    }
    for by_layer in loads.values():
        before, after, copies, seconds = [], [], 0, 0.0
        for layer, counts in by_layer.items():
            planner = planners[layer]
            held = owner_only(counts) if planner.current is None else (planner.current.routes, planner.current.copies)
            now = make_placement(who.method, counts, costs, held)
            before.append(float(np.std(counts.reshape(counts.shape[1], -1).sum(1))))
            after.append(now.balance_degree)
            copies += sum(map(len, now.copies))
            seconds += now.predicted_seconds
            planner.next(counts)
        found.balance_before.append(statistics.mean(before))
        found.balance_after.append(statistics.mean(after))
        found.copies.append(copies)
        found.seconds.append(seconds)
    return found


def run_loads(config: LoadsConfig, shows: bool = False) -> Result:
    """Replay the trace under every placement; results by placement, and the trace's sizes."""
    loads = read_loads(config.trace)
    experts, devices = next(iter(next(iter(loads.values())).values())).shape
    rows = {name: replay_placement(loads, config, name).row() for name in config.names}
    for row in rows.values():
        seconds = row["modelled_seconds"]
        row["speedup"] = rows["none"]["modelled_seconds"] / seconds if seconds else 1.0
    return {
        "trace": config.trace, "steps": len(loads), "layers": len(next(iter(loads.values()))), "experts": experts,
        "devices": devices, "config": asdict(config), "methods": rows,
    }  # fmt: skip


def shown(result: Result) -> Iterator[RenderableType]:
    """A line of sizes and a row per placement; writes the page of --html."""
    yield (
        f"{result['steps']} steps of {result['layers']} layers: {result['experts']} experts on {result['devices']} "
        "ranks; seconds are modelled, mean over steps"
    )
    yield table(HEADER, table_rows(result))
    if result["config"]["html"] is not None:
        write_loads(Path(result["config"]["html"]), result)
        yield f"written to {result['config']['html']}"


def table_rows(result: Result) -> list[tuple[str, ...]]:
    """Table rows, one per placement, with the columns of HEADER."""
    return [
        (
            name, f"{row['balance_degree']:.1f}", f"{row['rb']:.2f}", f"{row['copies']:.1f}",
            f"{1e3 * row['modelled_seconds']:.1f} ms", f"{row['speedup']:.3f} x",
        )
        for name, row in result["methods"].items()
    ]  # fmt: skip


def write_loads(path: Path, result: Result) -> None:
    """Write a self-contained HTML page of the trace and its placements; result: of `run_loads`."""
    loads, rows = read_loads(result["trace"]), result["methods"]
    steps, layers = list(loads), list(next(iter(loads.values())))

    def over_time(what: str) -> dict[str, Sequence[float]]:
        return {name: row["over_time"][what] for name, row in rows.items()}

    plain = rows["none"]["over_time"]["seconds"]
    saved = {
        name: [1e3 * (a - b) for a, b in zip(plain, row["over_time"]["seconds"], strict=True)]
        for name, row in rows.items()
        if name != "none"
    }
    sections = [
        Section("Balance", _BALANCE, draw_curves(over_time("balance_after"), x="step", y="balance degree, slots")),
        Section("Copies", _COPIES, draw_curves(over_time("copies"), x="step", y="copies")),
    ]
    if saved:
        sections.append(Section("Time saved", _SAVED, draw_curves(saved, x="step", y="milliseconds")))
    for layer in layers[:DRAWN_LAYERS]:
        totals = np.stack([loads[step][layer].sum(1) for step in steps])
        shares = totals / np.maximum(totals.sum(1, keepdims=True), 1)
        left_out = f" Layers from {layers[DRAWN_LAYERS]} on are left out." if len(layers) > DRAWN_LAYERS else ""
        sections.append(
            Section(
                f"Load of the experts of layer {layer}", _LOADS + left_out,
                draw_heat_map(shares.T, first=steps[0], x="step", y="expert", what="share of the tokens"),
            )
        )  # fmt: skip
    write_page(
        path,
        title=f"Loads of {result['experts']} experts on {result['devices']} ranks",
        subtitle=f"{result['layers']} layers, {result['steps']} steps, from {result['trace']}. Seconds are modelled: "
        f"{result['config']['token_us']:g} us a token, links of {result['config']['link']}.",
        header=HEADER,
        rows=table_rows(result),
        sections=sections,
    )


def generate(
    *,
    experts: int,
    devices: int,
    tokens: int,
    steps: int = 1,
    concentration: float = 0.3,
    drift: float = 0.05,
    seed: int = 0,
) -> Iterator[Integers]:
    """Generate counts [expert, device] of one layer over some steps: a Dirichlet gate with a random walk of its
    logits.

    tokens: of each device, times top_k. concentration: of the Dirichlet distribution, small for an unbalanced gate.
    drift: standard deviation of a step of the walk, in logits.
    """
    for name, value in (("experts", experts), ("devices", devices), ("steps", steps)):
        if value < 1:
            raise UsageError(f"generate: {name} must be at least 1, got {value}")
    if tokens < 0 or not concentration > 0 or drift < 0:
        raise UsageError(
            "generate: tokens and drift must be at least 0 and concentration above 0, got "
            f"{tokens}, {drift} and {concentration}"
        )
    random = np.random.default_rng(seed)
    logits = np.log(random.dirichlet(np.full(experts, concentration)) + 1e-9)
    own = DIFFERENCE * random.standard_normal((devices, experts))
    for _ in range(steps):
        gates = np.exp(logits + own)
        gates /= gates.sum(1, keepdims=True)
        yield np.stack([random.multinomial(tokens, gate) for gate in gates]).T.copy()
        logits = logits + drift * random.standard_normal(experts)


BENCHMARK = Benchmark(
    "loads", "compare expert placements on the token loads of oases train --record-loads", LoadsConfig(), run_loads,
    shown, size=None,
)  # fmt: skip
