"""Placements of experts by the performance model: each method beside the others, and beside the optimum.

Nothing runs on ranks: seconds are modelled. Planning time alone is measured, as the processor's.

    python benchmarks/placements.py --optimum 10 --traces natural.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import exp, log
from statistics import median
from typing import Any

import numpy as np
from rich.console import RenderableType

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.placement import Integers, Placement, owner_ranks, plan
from oases.terminal import percent, progress, table
from oases_bench.command_line import script
from oases_bench.harness import BenchConfig, Benchmark, Result
from oases_bench.loads import METHODS, generate, rb
from oases_train.config import option
from oases_train.traces import replay

CONCENTRATIONS = (0.05, 0.2, 0.5, 2.0, 10.0)
"""Concentrations of the generated gates: from a few experts that take all to almost even ones."""
COPIES = (1, 2, 4, None)
"""Copies that the memory budget lets a device hold, case by case; None for no budget."""
LAYERS = {
    "100gbit": Costs(token_seconds=2e-6, token_bytes=4096, expert_bytes=8 << 20, bandwidth=12.5e9,
                     non_expert_seconds=1e-3),
    "1gbit": Costs(token_seconds=4e-6, token_bytes=2048, expert_bytes=4 << 20, bandwidth=125e6,
                   non_expert_seconds=5e-3),
}  # fmt: skip
"""A layer behind a fast link and one behind a slow one, case by case."""
WHOLE = 64
"""Choices of a route up to which the optimum itself is sought; in larger cases a device's tokens may be divided."""
SAME = 1e-9
"""Relative difference that rounding makes."""
GAP = 1e-3
"""Relative gap between a bound and a placement at which the program is solved."""
UNIT = 1e-3
"""Seconds per unit of the program: HiGHS' tolerances are for numbers of about 1."""


@dataclass(frozen=True)
class PlacementsBenchConfig(BenchConfig):
    """Cases to plan."""

    devices: str = option("4,8,16,32,64", "numbers of devices, comma-separated")
    experts: int = option(1, "experts at home on each device")
    generated: int = option(100, "generated traces for each number of devices")
    tokens: int = option(1024, "tokens of each device, times the experts that each is sent to")
    traces: str | None = option(None, "recorded traces, separated by commas; see oases train --record-loads")
    steps: int = option(10, "steps taken from each layer of a recorded trace, evenly spread")
    optimum: int = option(20, "generated traces for each number of devices whose optimum is sought")
    optimum_devices: int = option(16, "devices up to which it is sought")
    optimum_seconds: float = option(30.0, "seconds that the mixed-integer program may take for one")
    seed: int = option(0, "of the first generated trace")

    def __post_init__(self) -> None:
        self.require_least(1, "experts", "tokens", "steps")
        self.require_least(0, "generated", "optimum", "seed")
        if not self.optimum_seconds > 0:
            raise UsageError(f"--optimum-seconds must be above 0, got {self.optimum_seconds}")
        self.numbers()

    def numbers(self) -> list[int]:
        """Numbers of devices. UsageError for invalid ones."""
        try:
            found = [int(each) for each in self.devices.split(",")]
        except ValueError:
            found = []
        if not found or min(found) < 2:
            raise UsageError(f"--devices {self.devices!r} must be whole numbers of at least 2, comma-separated")
        return found


@dataclass(frozen=True)
class Bound:
    """Lower bound of the seconds of all placements. solved: it is the optimum, up to `GAP`."""

    seconds: float
    solved: bool


def bound(
    counts: Integers, costs: Costs, slots: int, *, seconds: float, below: float = np.inf, whole: bool = False
) -> Bound:
    """Lower bound for placements, computed within `seconds`.

    below: the seconds of a placement that is known, which spares HiGHS all that is above. whole: as placements are,
    all of a device's tokens for an expert go to one device; else they may be divided, which is at most as slow as the
    best placement and found much sooner. UsageError for costs other than those of `LAYERS`' form.
    """
    plain = Costs(
        token_seconds=costs.token_seconds, token_bytes=costs.token_bytes, expert_bytes=costs.expert_bytes,
        bandwidth=costs.bandwidth, non_expert_seconds=costs.non_expert_seconds,
    )  # fmt: skip
    if costs != plain:
        raise UsageError(f"the bound is of placements between devices of one node, without latencies; got {costs}")
    milp = (_WholeMilp if whole else _DividedMilp)(counts, costs, slots)
    if np.isfinite(below):
        milp.at_least(-below * (1 + 1e-6) / UNIT, (-1.0, milp.of("total")))
    result = milp.solve(seconds)
    if result.status == 2:  # nothing is below, so that is the best
        return Bound(below, True)
    lowest = getattr(result, "mip_dual_bound", None)
    return Bound(max(0.0, float(lowest or 0.0)) * UNIT, result.status == 0)


class _PlacementMilp:
    """Mixed-integer linear program: named variables and constraint rows.

    A variable of a maximum is bounded below by all rows of its name.
    """

    def __init__(self, counts: Integers, costs: Costs, slots: int) -> None:
        self.counts, self.costs = counts, costs
        self.experts, self.devices = counts.shape
        self.home = owner_ranks(*counts.shape)
        self._number: dict[tuple[object, ...], int] = {}
        self._whole: list[int] = []
        self._rows: list[dict[int, float]] = []
        self._bounds: list[tuple[float, float]] = []
        self._copies(slots)
        self._tokens()
        self._parameters()
        self._seconds()

    def solve(self, seconds: float) -> Any:
        """Solve with HiGHS; return scipy's result."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        size = len(self._number)
        cost, upper = np.zeros(size), np.full(size, np.inf)
        cost[self.of("total")] = 1
        upper[self._whole] = 1
        entries = ((at, to, by) for at, terms in enumerate(self._rows) for to, by in terms.items())
        row, column, value = zip(*entries, strict=True)
        low, high = np.array(self._bounds).T
        return milp(
            cost,
            integrality=np.isin(np.arange(size), self._whole).astype(int),
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(csr_array((value, (row, column)), (len(self._rows), size)), low, high),
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )

    def of(self, *name: object) -> int:
        """Index of a variable, created on first use."""
        return self._number.setdefault(name, len(self._number))

    def choice(self, *name: object) -> int:
        """Binary variable."""
        variable = self.of(*name)
        self._whole.append(variable)
        return variable

    def at_least(self, bound: float, *terms: tuple[float, int]) -> None:
        """Add a row: the sum of the terms is at least `bound`."""
        self._row(bound, np.inf, terms)

    def equal(self, bound: float, *terms: tuple[float, int]) -> None:
        """Add a row: the sum of the terms equals `bound`."""
        self._row(bound, bound, terms)

    def _row(self, low: float, high: float, terms: Iterable[tuple[float, int]]) -> None:
        row: dict[int, float] = {}
        for by, variable in terms:
            row[variable] = row.get(variable, 0.0) + by
        self._rows.append(row)
        self._bounds.append((low, high))

    def others(self, expert: int) -> list[int]:
        """All devices but the owner."""
        return [device for device in range(self.devices) if device != self.home[expert]]

    def at_most(self, moment: str, by: float, terms: Sequence[tuple[float, int]], constant: float = 0.0) -> None:
        """Add a row: the seconds of `moment` are at least `by` times (sum of terms + constant)."""
        by /= UNIT
        self.at_least(by * constant, (1.0, self.of(moment)), *((-by * share, at) for share, at in terms))

    def _copies(self, slots: int) -> None:
        """Variables: devices with replicas, and the number of replicas of each expert."""
        for expert in range(self.experts):
            held = [(-1.0, self.choice("copy", expert, device)) for device in self.others(expert)]
            numbers = [self.choice("number", expert, k) for k in range(self.devices)]
            self.equal(1, *((1, each) for each in numbers))
            self.equal(0, *((float(k), each) for k, each in enumerate(numbers)), *held)
        for device in range(self.devices):
            held = [(-1.0, self.of("copy", e, device)) for e in range(self.experts) if self.home[e] != device]
            if held and slots < len(held):
                self.at_least(-slots, *held)

    def _tokens(self) -> None:
        """Rows for the tokens that each device computes, sends and receives."""
        raise NotImplementedError

    def _parameters(self) -> None:
        """Rows for parameter transfers: shares from owner to replicas, then all-gather; see csrc/experts.cpp."""
        every, numbers = range(self.experts), range(1, self.devices)
        size = self.costs.expert_bytes / self.costs.bandwidth
        for expert in every:
            for device in self.others(expert):  # one of k: there is a copy, and there are k
                parts = [(1.0, self.of("of", expert, device, k)) for k in numbers]
                self.equal(0, (-1.0, self.of("copy", expert, device)), *parts)
                for k, (_, part) in zip(numbers, parts, strict=True):
                    self.at_least(0, (1.0, self.of("number", expert, k)), (-1.0, part))
            for k in numbers:
                parts = [(1.0, self.of("of", expert, device, k)) for device in self.others(expert)]
                self.equal(0, (-float(k), self.of("number", expert, k)), *parts)
        for device in range(self.devices):
            mine = [expert for expert in every if self.home[expert] == device]
            self.at_most("first", size, [(-1.0, self.of("number", e, 0)) for e in mine], len(mine))
            copies = [(k, self.of("of", e, device, k)) for e in every if self.home[e] != device for k in numbers]
            self.at_most("first", size, [(1 / k, part) for k, part in copies])
            self.at_most("second", size, [((k - 1) / k, part) for k, part in copies])

    def _seconds(self) -> None:
        """Rows for the predicted seconds, as in csrc/experts.cpp."""
        tokens, wire = self.of("tokens"), self.of("wire")
        parts = [(-4.0, wire), (-(1 + self.costs.backward), tokens)]
        for hides in (1.0, self.costs.backward):
            share, join = self.of("share left", hides), self.of("join left", hides)
            self.at_least(-hides * self.costs.non_expert_seconds / UNIT, (1, share), (-1, self.of("first")))
            self.at_least(0, (1, join), (hides, tokens), (-1, self.of("second")))
            parts += [(-1.0, share), (-1.0, join)]
        self.at_least(0, (1, self.of("total")), *parts)


class _WholeMilp(_PlacementMilp):
    """Each device's tokens for an expert go to its owner or to a replica."""

    def _tokens(self) -> None:
        every = list(product(range(self.experts), range(self.devices)))
        for expert, source in every:
            to = [self.choice("route", expert, source, device) for device in range(self.devices)]
            self.equal(1, *((1, each) for each in to))
            for device in self.others(expert):
                self.at_least(0, (1, self.of("copy", expert, device)), (-1, to[device]))
        size = self.costs.token_bytes / self.costs.bandwidth
        for device in range(self.devices):
            here = [(float(self.counts[e, s]), self.of("route", e, s, device)) for e, s in every]
            self.at_most("tokens", self.costs.token_seconds, here)
            self.at_most("wire", size, [term for term, (_, s) in zip(here, every, strict=True) if s != device])
            away = [(float(self.counts[e, device]), self.of("route", e, device, to))
                    for e in range(self.experts) for to in range(self.devices) if to != device]  # fmt: skip
            self.at_most("wire", size, away)


class _DividedMilp(_PlacementMilp):
    """Relaxation: a device computes part of its own tokens of an expert, and part of all others'."""

    def _tokens(self) -> None:
        size = self.costs.token_bytes / self.costs.bandwidth
        total = self.counts.sum(1).astype(float)
        for expert in range(self.experts):
            parts = []
            for device in range(self.devices):
                own, rest = self.of("own", expert, device), self.of("rest", expert, device)
                parts += [(1.0, own), (1.0, rest)]
                mine = float(self.counts[expert, device])
                if device == self.home[expert]:
                    self.at_least(-mine, (-1.0, own))
                    continue
                copy = self.of("copy", expert, device)
                self.at_least(0, (mine, copy), (-1.0, own))
                self.at_least(0, (float(total[expert]), copy), (-1.0, own), (-1.0, rest))
            self.equal(float(total[expert]), *parts)
        for device in range(self.devices):
            kept = [(1.0, self.of("own", e, device)) for e in range(self.experts)]
            foreign = [(1.0, self.of("rest", e, device)) for e in range(self.experts)]
            self.at_most("tokens", self.costs.token_seconds, kept + foreign)
            self.at_most("wire", size, foreign)
            away = [(-1.0, at) for _, at in kept]
            sent = float(self.counts[:, device].sum())
            self.at_most("wire", size, away, sent)


@dataclass(frozen=True)
class Case:
    """One layer's counts [expert, device], what it costs, and the bytes that copies may take on a device."""

    trace: str
    counts: Integers
    link: str
    memory_budget: float | None

    @property
    def costs(self) -> Costs:
        """Costs of the layer on this link."""
        return LAYERS[self.link]


@dataclass(frozen=True)
class Outcome:
    """A case's placements by method, seconds of planning by method, and the bound where one was sought."""

    case: Case
    placements: dict[str, Placement]
    planning: dict[str, float]
    optimum: Bound | None = None

    def ratio(self, method: str, other: str = "none") -> float:
        """Modelled seconds over those of another method."""
        return self.placements[method].predicted_seconds / self.placements[other].predicted_seconds

    def rb(self, method: str) -> float:
        """Balance ratio, see `oases_bench.loads.rb`."""
        return rb(*(self.placements[each].balance_degree for each in ("none", method)))


def generated_cases(config: PlacementsBenchConfig, devices: int) -> Iterator[Case]:
    """Concentration, link and memory budget change from case to case, each with a period of its own."""
    for number in range(config.generated):
        (counts,) = generate(
            experts=config.experts * devices, devices=devices, tokens=config.tokens, seed=config.seed + number,
            concentration=CONCENTRATIONS[number % len(CONCENTRATIONS)],
        )  # fmt: skip
        yield _case("generated", counts, number)


def recorded_cases(path: str, steps: int) -> Iterator[Case]:
    """Steps of each layer, evenly spread, behind each link in turn. UsageError for a trace that has none."""
    layers: dict[int, list[Integers]] = {}
    for _, layer, counts in replay(path):
        layers.setdefault(layer, []).append(counts)
    if not layers:
        raise UsageError(f"trace {path!r} has no step; record one with --record-loads")
    number = 0
    for every in layers.values():
        for at in sorted({round(each * (len(every) - 1) / max(1, steps - 1)) for each in range(steps)}):
            yield _case(path, every[at], number)
            number += 1


def _case(trace: str, counts: Integers, number: int) -> Case:
    link = list(LAYERS)[number % len(LAYERS)]
    copies = COPIES[number // len(LAYERS) % len(COPIES)]
    return Case(trace, counts, link, None if copies is None else copies * LAYERS[link].expert_bytes)


def outcome(case: Case, *, optimum_seconds: float = 0.0) -> Outcome:
    """All methods at the case's budget; with optimum_seconds, what the optimum cannot be below."""
    placements, planning = {}, {}
    for method in METHODS:
        start = time.process_time()
        placements[method] = plan(case.counts, case.costs, method=method, memory_budget=case.memory_budget)
        planning[method] = time.process_time() - start
    if not optimum_seconds:
        return Outcome(case, placements, planning)
    experts = len(case.counts)
    budget = case.memory_budget
    slots = experts if budget is None else int(min(experts, budget // case.costs.expert_bytes))
    below = placements["prophet"].predicted_seconds
    whole = experts * case.counts.shape[1] ** 2 <= WHOLE
    lowest = bound(case.counts, case.costs, slots, seconds=optimum_seconds, below=below, whole=whole)
    return Outcome(case, placements, planning, lowest)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Summary of the cases. Ratios are geometric means; rb is a median, as it is infinite for perfect balance."""
    rows: dict[str, Any] = {}
    for method in METHODS:
        rows[method] = {
            "modelled_seconds": sum(each.placements[method].predicted_seconds for each in outcomes),
            "over_none": _mean(each.ratio(method) for each in outcomes),
            "balance_degree": median(each.placements[method].balance_degree for each in outcomes),
            "rb": median(each.rb(method) for each in outcomes),
            "planning_seconds": median(each.planning[method] for each in outcomes),
        }
    above = {other: sum(each.ratio("prophet", other) > 1 + SAME for each in outcomes) for other in METHODS[:-1]}
    found: dict[str, Any] = {"cases": len(outcomes), "methods": rows, "prophet_above": above}
    sought = [each for each in outcomes if each.optimum is not None]
    if sought:
        found["optimum"] = _beside_optimum(sought)
    return found


def _beside_optimum(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """In all but small cases the bound's tokens may be divided, so the best placement is between it and prophet's."""
    solved = [each for each in outcomes if each.optimum is not None and each.optimum.solved]
    found: dict[str, Any] = {"cases": len(outcomes), "solved_share": len(solved) / len(outcomes)}
    for method in METHODS:
        ratios = [each.placements[method].predicted_seconds / each.optimum.seconds for each in solved
                  if each.optimum is not None]  # fmt: skip
        if ratios:
            found[method] = {
                "over_bound": _mean(ratios), "over_bound_max": max(ratios),
                "within_3_percent": sum(each <= 1.03 for each in ratios) / len(ratios),
            }  # fmt: skip
    return found


def _mean(ratios: Iterable[float]) -> float:
    logs = [log(each) if each else 0.0 for each in ratios]
    return exp(sum(logs) / len(logs))


def run_placements_bench(config: PlacementsBenchConfig, shows: bool = True) -> Result:
    """By number of devices the generated cases, by path the recorded ones."""
    parts: dict[str, list[Case]] = {str(number): list(generated_cases(config, number)) for number in config.numbers()}
    for path in filter(None, (config.traces or "").split(",")):
        parts[path] = list(recorded_cases(path, config.steps))
    parts = {name: cases for name, cases in parts.items() if cases}
    layers = {name: asdict(each) for name, each in LAYERS.items()}
    result: Result = {"config": asdict(config), "layers": layers, "cases": {}}
    total, done = sum(map(len, parts.values())), 0
    with progress("placements", total, shows) as advance:
        for name, cases in parts.items():
            outcomes = []
            for number, case in enumerate(cases):
                seek = number < config.optimum and case.counts.shape[1] <= config.optimum_devices
                outcomes.append(outcome(case, optimum_seconds=config.optimum_seconds if seek else 0.0))
                done += 1
                advance(done)
            result["cases"][name] = summary(outcomes)
    return result


_COLUMNS = (
    "devices or trace", "method", "of none's time", "RB", "over bound", "at most", "within 3 %", "above it",
    "planning",
)  # fmt: skip


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per method and part of the cases."""
    rows: list[tuple[str, ...]] = []
    for part, found in result["cases"].items():
        for method, row in found["methods"].items():
            beside = found.get("optimum", {}).get(method)
            cells = ["-"] * 3
            if beside is not None:
                cells = [f"{beside[key]:.3f}" for key in ("over_bound", "over_bound_max")]
                cells.append(percent(beside["within_3_percent"]))
            above = found["prophet_above"].get(method)
            rows.append(
                (
                    part.rpartition("/")[2], method, f"{row['over_none']:.3f}", f"{row['rb']:.2f}", *cells,
                    "-" if above is None else str(above), f"{1e3 * row['planning_seconds']:.2f} ms",
                )
            )  # fmt: skip
        if "optimum" in found:
            sought = found["optimum"]
            rows.append((part, f"bound: {percent(sought['solved_share'])} of {sought['cases']} solved", *["-"] * 7))
    yield table(_COLUMNS, rows, words=2, title="modelled; geometric means, RB and planning medians")


BENCHMARK = Benchmark(
    "placements",
    "placements of experts by their modelled time, beside the optimum",
    PlacementsBenchConfig(),
    run_placements_bench,
    shown,
    size=None,
)

if __name__ == "__main__":
    script(BENCHMARK, __file__)
