"""A recorded trace of loads, looked at: what every way of placing experts would have made of it, step by step.

A planner sees a step's loads when the step is over, as in training, so each step is computed with what was planned
from those before. Seconds are modelled, of experts and what they send; nothing is run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.forecast import Planner
from oases.moe.placement import Integers, make_placement, owner_only
from oases.moe.traces import replay
from oases.simulator.drawing import Section, draw_curves, draw_heat_map, write_page
from oases.testbed.link import link_bytes_per_second
from oases.train.model_options import option

METHODS = ("none", "faster_moe", "eplb", "prophet")


@dataclass(frozen=True)
class PlacementMethod:
    """A way to place experts. schedule: of its copies. coupled: the search knows that they travel under compute."""

    method: str
    schedule: str
    coupled: bool


PLACEMENT_METHODS = {
    "none": PlacementMethod("none", "plain", False),
    "faster_moe": PlacementMethod("faster_moe", "blocking", False),
    "eplb": PlacementMethod("eplb", "blocking", False),
    "prophet": PlacementMethod("prophet", "block_wise", True),
}

DRAWN_LAYERS = 6
"""Layers whose experts a page shows one by one."""
HEADER = ("placement", "balance degree", "RB", "copies", "modelled", "against none")
_LOADS = (
    "Share of the layer's tokens that each expert gets, step by step. A row that stays bright is an expert that is "
    "always busy: its rank is what the others wait for, unless it is copied."
)
_BALANCE = (
    "Standard deviation of the ranks' loads, in slots (pairs of a token and one of its experts), mean of layers."
)
_COPIES = "Copies of experts on other ranks than their home, of all layers."
_SAVED = "Modelled seconds of a step, of all layers, less than with every expert at home."


@dataclass(frozen=True)
class LoadsConfig:
    """What the loads are laid on: experts, and the ranks and links of a cluster."""

    methods: str = option(",".join(METHODS), f"placement methods to compare, comma-separated: {', '.join(METHODS)}")
    hidden: int = option(512, "hidden size, features")
    expert_hidden: int = option(0, "intermediate size of an expert, features; 0 = 4 x hidden")
    token_us: float = option(40.0, "forward time of an expert per token, microseconds")
    non_expert_ms: float = option(0.0, "compute between MoE layers, which can hide replica transfers, milliseconds")
    link: str = option("1gbit", "link bandwidth of a rank, e.g. 500mbit, 1gbit")
    latency_us: float = option(200.0, "latency of a collective, microseconds")
    expert_memory: int = option(-1, "memory for expert replicas per rank and layer, bytes; -1 = unlimited")

    @property
    def costs(self) -> Costs:
        """Of a layer, in float32."""
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
        found = [name.strip() for name in self.methods.split(",")]
        for name in found:
            if name not in PLACEMENT_METHODS:
                raise UsageError(f"--methods {name!r} is unknown; known are {', '.join(METHODS)}")
        return list(dict.fromkeys(["none", *found]))

    def check(self) -> None:
        """UsageError for what cannot be."""
        for name, least in (("hidden", 1), ("expert_hidden", 0), ("expert_memory", -1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        assert self.costs
        assert self.names


def rb(before: float, after: float) -> float:
    """The paper's measure of balance, before over after: 1 where all was even already, infinite where all is now."""
    return 1.0 if before == after else before / after if after else float("inf")


@dataclass
class ReplayedPlacement:
    """One placement over the steps of a trace: means over layers of balance degrees, sums of copies and seconds."""

    balance_before: list[float] = field(default_factory=list)
    balance_after: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Means over the steps; rb: what the balance degree is divided by."""
        before, after = statistics.mean(self.balance_before), statistics.mean(self.balance_after)
        return {
            "balance_degree": after,
            "rb": rb(before, after),
            "copies": statistics.mean(self.copies),
            "modelled_seconds": statistics.mean(self.seconds),
            "over_time": asdict(self),
        }


def read_loads(path: str | Path) -> dict[int, dict[int, Integers]]:
    """Counts [expert, device] by step and layer. UsageError for no trace, an empty one, and steps without a layer."""
    found: dict[int, dict[int, Integers]] = {}
    for step, layer, counts in replay(path):
        found.setdefault(step, {})[layer] = counts
    if not found:
        raise UsageError(f"trace {str(path)!r} holds no step; record one with --record-loads")
    layers = set(next(iter(found.values())))
    for step, by_layer in list(found.items()):
        if set(by_layer) != layers:
            if step == max(found) and step != min(found):  # a run that was killed leaves a part of its last step
                del found[step]
                continue
            raise UsageError(
                f"trace {str(path)!r}: step {step} has layers {sorted(by_layer)}, others have {sorted(layers)}"
            )
    return found


def replay_placement(loads: dict[int, dict[int, Integers]], config: LoadsConfig, name: str) -> ReplayedPlacement:
    """What the placement called `name` makes of the loads."""
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


def compare_placements(path: str | Path, config: LoadsConfig) -> dict[str, Any]:
    """Every placement over a trace, and the trace's sizes."""
    config.check()
    loads = read_loads(path)
    experts, devices = next(iter(next(iter(loads.values())).values())).shape
    rows = {name: replay_placement(loads, config, name).row() for name in config.names}
    for row in rows.values():
        seconds = row["modelled_seconds"]
        row["speedup"] = rows["none"]["modelled_seconds"] / seconds if seconds else 1.0
    return {
        "trace": str(path), "steps": len(loads), "layers": len(next(iter(loads.values()))), "experts": experts,
        "devices": devices, "config": asdict(config), "methods": rows,
    }  # fmt: skip


def table_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each placement, in the order of HEADER."""
    return [
        (
            name, f"{row['balance_degree']:.1f}", f"{row['rb']:.2f}", f"{row['copies']:.1f}",
            f"{1e3 * row['modelled_seconds']:.1f} ms", f"{row['speedup']:.3f} x",
        )
        for name, row in result["methods"].items()
    ]  # fmt: skip


def write_loads(path: Path, result: dict[str, Any]) -> None:
    """Write a self-contained HTML page of the trace and its placements; result: of `compare_placements`."""
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
