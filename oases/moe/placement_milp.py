"""Optimal placement by a mixed-integer linear program (MILP), as a reference for the search."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.placement_data import Chosen, Integers, owner_ranks

MOST = 1500
"""Maximum number of route variables; HiGHS takes minutes for more."""
SECONDS = 60.0
"""Time limit of the solver."""
GAP = 1e-3
"""Relative optimality gap."""


def optimal_placement(counts: Integers, costs: Costs, slots: int) -> Chosen:
    """Routes and copies. slots: replicas that a device may hold.

    UsageError for a case that is too large, was not solved in time, or has nodes.
    """
    experts, devices = counts.shape
    if experts * devices * devices > MOST:
        raise UsageError(
            f"the optimum for {experts} experts on {devices} devices takes too long; method='prophet' finds a "
            f"placement for any, and up to {MOST} experts x devices x devices can be solved"
        )
    program = FullPlacementMilp(counts, costs, slots)
    result = program.solve(SECONDS)
    if result.status != 0:
        raise UsageError(f"the optimum was not found in {SECONDS:.0f} s ({result.message}); use a smaller case")
    return program.chosen(result.x)


class PlacementMilp:
    """Mixed-integer linear program: named variables and constraint rows.

    A variable of a maximum is bounded below by all rows of its name.
    """

    def __init__(self, counts: Integers, costs: Costs, slots: int) -> None:
        if costs.devices_per_node:
            raise UsageError("the optimum requires uniform devices; leave out devices_per_node")
        self.counts, self.costs = counts, costs
        self.experts, self.devices = counts.shape
        self.home = owner_ranks(*counts.shape)
        self.both_ways = costs.both_ways or 2 * costs.bandwidth
        self.unit = 1e-3
        """Seconds per unit of the program: HiGHS' tolerances are for numbers of about 1."""
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

    def choice(self, *name: object) -> int:
        """Binary variable."""
        variable = self.of(*name)
        self._whole.append(variable)
        return variable

    def others(self, expert: int) -> list[int]:
        """All devices but the owner."""
        return [device for device in range(self.devices) if device != self.home[expert]]

    def at_most(self, moment: str, by: float, terms: list[tuple[float, int]], constant: float = 0.0) -> None:
        """Add a row: the seconds of `moment` are at least `by` times (sum of terms + constant)."""
        by /= self.unit
        self.at_least(by * constant, (1.0, self.of(moment)), *((-by * share, at) for share, at in terms))

    def _copies(self, slots: int) -> None:
        """Variables: devices with replicas, and the number of replicas of each expert."""
        for expert in range(self.experts):
            held = [(-1.0, self.choice("copy", expert, device)) for device in self.others(expert)]
            if self.costs.transfer == "mean":
                continue
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
        costs, every = self.costs, range(self.experts)
        size = costs.expert_bytes / costs.bandwidth
        if costs.transfer == "mean":
            self.at_most("first", size / self.devices, [(1.0, self.of("copy", e, d)) for e in every
                                                         for d in self.others(e)])  # fmt: skip
            return
        for expert in every:
            others, numbers = self.others(expert), range(1, self.devices)
            for device in others:  # one of k: there is a copy, and there are k
                parts = [(1.0, self.of("of", expert, device, k)) for k in numbers]
                self.equal(0, (-1.0, self.of("copy", expert, device)), *parts)
                for k, (_, part) in zip(numbers, parts, strict=True):
                    self.at_least(0, (1.0, self.of("number", expert, k)), (-1.0, part))
            for k in numbers:
                parts = [(1.0, self.of("of", expert, device, k)) for device in others]
                self.equal(0, (-float(k), self.of("number", expert, k)), *parts)
            self.at_least(1, (1, self.of("any")), (1, self.of("number", expert, 0)))
        for device in range(self.devices):
            mine = [expert for expert in every if self.home[expert] == device]
            sent = [(-1.0, self.of("number", e, 0)) for e in mine]
            held = [(1.0, self.of("copy", e, device)) for e in every if self.home[e] != device]
            self.at_most("first", size, sent, len(mine))
            self.at_most("handling", costs.handling_seconds, sent + held, len(mine))
            copies = [(e, k) for e in every if self.home[e] != device for k in range(1, self.devices)]
            received = [(1 / k, self.of("of", e, device, k)) for e, k in copies]
            self.at_most("first", size, received)
            self.at_most("first", costs.expert_bytes / self.both_ways, sent + received, len(mine))
            slower = max(size, 2 * costs.expert_bytes / self.both_ways)
            self.at_most("second", slower, [((k - 1) / k, self.of("of", e, device, k)) for e, k in copies])

    def _seconds(self) -> None:
        """Rows for the predicted seconds, as in csrc/experts.cpp."""
        costs = self.costs
        total, tokens, wire = (self.of(name) for name in ("total", "tokens", "wire"))
        moving = [(1.0, self.of("first")), (1.0, self.of("second")), (2 * costs.latency / self.unit, self.of("any"))]
        parts = [(-4.0, wire), (-(1 + costs.backward), tokens), (-1.0, self.of("handling"))]
        fixed = (4 * costs.latency + costs.fixed_seconds) / self.unit
        if not costs.scheduled:
            self.at_least(fixed, (1, total), *parts, *((-2 * by, at) for by, at in moving))
            return
        if costs.transfer == "mean":
            for name, hides in (("trans", 1.0), ("agg", costs.backward)):
                window = hides * costs.non_expert_seconds / self.unit
                self.at_least(-window, (1, self.of(name)), (hides, tokens), *((-by, at) for by, at in moving))
                parts.append((-1.0, self.of(name)))
            self.at_least(fixed, (1, total), *parts)
            return
        starts = (-costs.latency / self.unit, self.of("any"))
        if costs.leading:
            for name, hides in (("first", 1.0), ("second", costs.backward)):
                left = self.of(name, "left")
                self.at_least(-hides * costs.non_expert_seconds / self.unit, (1, left), (-1, self.of(name)), starts)
                parts += [(-1.0, left), (-1.0, self.of(name)), starts]
            self.at_least(fixed, (1, total), *parts)
            return
        for hides in (1.0, costs.backward):
            window = hides * costs.non_expert_seconds / self.unit
            share, join = self.of("share left", hides), self.of("join left", hides)
            self.at_least(-window, (1, share), (-1, self.of("first")), starts)
            self.at_least(0, (1, join), (hides, tokens), (-1, self.of("second")), starts)
            parts += [(-1.0, share), (-1.0, join)]
        self.at_least(fixed, (1, total), *parts)


class FullPlacementMilp(PlacementMilp):
    """MILP in which each device's tokens for an expert go to its owner or to a replica."""

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
            foreign = [term for term, (_, source) in zip(here, every, strict=True) if source != device]
            self.at_most("wire", size, foreign)
            away = [(float(self.counts[e, device]), self.of("route", e, device, to))
                    for e in range(self.experts) for to in range(self.devices) if to != device]  # fmt: skip
            self.at_most("wire", size, away)
            self.at_most("wire", self.costs.token_bytes / self.both_ways, foreign + away)

    def chosen(self, x: NDArray[np.float64]) -> Chosen:
        """Routes and copies of a solution."""
        every = range(self.devices)
        routes = np.array([[max(every, key=lambda to: float(x[self.of("route", expert, source, to)]))
                            for source in every] for expert in range(self.experts)])  # fmt: skip
        held = [[d for d in self.others(expert) if x[self.of("copy", expert, d)] > 0.5]
                for expert in range(self.experts)]  # fmt: skip
        return routes.astype(np.int64), held
