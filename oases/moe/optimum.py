"""The best placement, as a mixed-integer programme: for small cases, to see how far a search is from it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.placement import Chosen, Integers, homes

MOST = 1500
"""Choices of a route that HiGHS is asked to make; it takes minutes for more."""
SECONDS = 60.0
"""What it may take."""


def optimum(counts: Integers, costs: Costs, slots: int) -> Chosen:
    """Routes and copies. slots: copies that a device may hold.

    UsageError for a case that is too large to solve, was not solved in time, or has nodes.
    """
    experts, devices = counts.shape
    if costs.devices_per_node:
        raise UsageError("the optimum is for devices that are all alike; leave out devices_per_node")
    if experts * devices * devices > MOST:
        raise UsageError(
            f"the optimum for {experts} experts on {devices} devices takes too long; method='prophet' finds a "
            f"placement for any, and up to {MOST} experts x devices x devices can be solved"
        )
    return _Programme(counts, costs, slots).solve()


class _Programme:
    """Variables by name, rows as they are added. Where the seconds are linear in what a row sums up, so is the row."""

    def __init__(self, counts: Integers, costs: Costs, slots: int) -> None:
        self.counts, self.costs = counts, costs
        self.experts, self.devices = counts.shape
        self.home = homes(*counts.shape)
        self._number: dict[tuple[object, ...], int] = {}
        self._whole: list[int] = []
        self._rows: list[dict[int, float]] = []
        self._bounds: list[tuple[float, float]] = []
        self._choices(slots)
        self._tokens()
        self._parameters()
        self._seconds()

    def solve(self) -> Chosen:
        """HiGHS' answer."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        size = len(self._number)
        cost, upper = np.zeros(size), np.full(size, np.inf)
        cost[self.of("total")] = 1
        upper[self._whole] = 1
        row, column, value = zip(*((at, to, by) for at, terms in enumerate(self._rows) for to, by in terms.items()),
                                 strict=True)  # fmt: skip
        low, high = np.array(self._bounds).T
        result = milp(
            cost,
            integrality=np.isin(np.arange(size), self._whole).astype(int),
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(csr_array((value, (row, column)), (len(self._rows), size)), low, high),
            options={"time_limit": SECONDS, "mip_rel_gap": 1e-3},
        )
        if result.status != 0:
            raise UsageError(f"the optimum was not found in {SECONDS:.0f} s ({result.message}); take a smaller case")
        routes = np.array([[self._chosen(result.x, expert, device) for device in range(self.devices)]
                           for expert in range(self.experts)])  # fmt: skip
        held = [[int(d) for d in self._others(expert) if result.x[self.of("copy", expert, d)] > 0.5]
                for expert in range(self.experts)]  # fmt: skip
        return routes.astype(np.int64), held

    def of(self, *name: object) -> int:
        """A variable's number, made where it is new."""
        return self._number.setdefault(name, len(self._number))

    def at_least(self, bound: float, *terms: tuple[float, int]) -> None:
        """A row: the sum of the terms is at least `bound`."""
        self._row(bound, np.inf, terms)

    def equal(self, bound: float, *terms: tuple[float, int]) -> None:
        """A row: the sum of the terms is `bound`."""
        self._row(bound, bound, terms)

    def _row(self, low: float, high: float, terms: Iterable[tuple[float, int]]) -> None:
        row: dict[int, float] = {}
        for by, variable in terms:
            row[variable] = row.get(variable, 0.0) + by
        self._rows.append(row)
        self._bounds.append((low, high))

    def _choice(self, *name: object) -> int:
        variable = self.of(*name)
        self._whole.append(variable)
        return variable

    def _others(self, expert: int) -> list[int]:
        return [device for device in range(self.devices) if device != self.home[expert]]

    def _choices(self, slots: int) -> None:
        """Each device's tokens go to the home or to one that has a copy; how many copies an expert has."""
        for expert in range(self.experts):
            for device in self._others(expert):
                self._choice("copy", expert, device)
            for source in range(self.devices):
                to = [self._choice("route", expert, source, device) for device in range(self.devices)]
                self.equal(1, *((1, each) for each in to))
                for device in self._others(expert):
                    self.at_least(0, (1, self.of("copy", expert, device)), (-1, to[device]))
            numbers = [self._choice("number", expert, k) for k in range(self.devices)]
            self.equal(1, *((1, each) for each in numbers))
            copies = [(-1.0, self.of("copy", expert, device)) for device in self._others(expert)]
            self.equal(0, *((float(k), each) for k, each in enumerate(numbers)), *copies)
        for device in range(self.devices):
            held = [e for e in range(self.experts) if self.home[e] != device]
            if held:
                self.at_least(-slots, *((-1, self.of("copy", e, device)) for e in held))

    def _tokens(self) -> None:
        """What each device computes, sends and receives."""
        for device in range(self.devices):
            here = [(float(self.counts[e, s]), self.of("route", e, s, device))
                    for e, s in product(range(self.experts), range(self.devices))]  # fmt: skip
            self._at_most("tokens", self.costs.token_seconds, here)
        size = self.costs.token_bytes / self.costs.bandwidth
        every = list(product(range(self.experts), range(self.devices), range(self.devices)))
        for device in range(self.devices):
            flow = [(float(self.counts[e, s]), self.of("route", e, s, t), s, t) for e, s, t in every if s != t]
            self._at_most("wire", size, [(by, route) for by, route, source, _ in flow if source == device])
            self._at_most("wire", size, [(by, route) for by, route, _, to in flow if to == device])

    def _parameters(self) -> None:
        """A share from home to each copy, then each share to all others: see csrc/experts.cpp."""
        costs, every = self.costs, range(self.experts)
        if costs.transfer == "mean":
            size = costs.expert_bytes / self.devices / costs.bandwidth
            self._at_most("first", size, [(1.0, self.of("copy", e, d)) for e in every for d in self._others(e)])
            return
        for expert in every:
            others = self._others(expert)
            none = self.of("number", expert, 0)
            share, rest = ([(1.0, self.of(what, expert, d)) for d in others] for what in ("share", "rest"))
            self.equal(1, *share, (1, none))
            self.equal(-1, *rest, (-1, none), *((-1.0, self.of("copy", expert, d)) for d in others))
            for device, k in product(others, range(1, self.devices)):
                both = ((-1.0, self.of("copy", expert, device)), (-1.0, self.of("number", expert, k)))
                for what, part in (("share", 1 / k), ("rest", (k - 1) / k)):
                    self.at_least(-part, (1.0, self.of(what, expert, device)), *((part * by, at) for by, at in both))
            self.at_least(1, (1, self.of("any")), (1, none))
        size = costs.expert_bytes / costs.bandwidth
        for device in range(self.devices):
            mine = [e for e in every if self.home[e] == device]
            self._at_most("first", size, [(-1.0, self.of("number", e, 0)) for e in mine], size * len(mine))
            for what, moment in (("share", "first"), ("rest", "second")):
                here = [(1.0, self.of(what, e, device)) for e in every if self.home[e] != device]
                self._at_most(moment, size, here)

    def _at_most(self, moment: str, by: float, terms: list[tuple[float, int]], constant: float = 0.0) -> None:
        """The seconds of a moment are at least `by` times the sum, and the constant."""
        self.at_least(constant, (1.0, self.of(moment)), *((-by * share, at) for share, at in terms))

    def _seconds(self) -> None:
        """Equation (8), or (6)."""
        costs = self.costs
        total, tokens, wire = (self.of(name) for name in ("total", "tokens", "wire"))
        moving = [(1.0, self.of("first")), (1.0, self.of("second")), (2 * costs.latency, self.of("any"))]
        parts = [(-4.0, wire), (-(1 + costs.backward), tokens)]
        if not costs.scheduled:
            self.at_least(4 * costs.latency, (1, total), *parts, *((-2 * by, at) for by, at in moving))
            return
        for name, hides in (("trans", 1.0), ("agg", costs.backward)):
            window = hides * costs.non_expert_seconds
            self.at_least(-window, (1, self.of(name)), (hides, tokens), *((-by, at) for by, at in moving))
            parts.append((-1.0, self.of(name)))
        self.at_least(4 * costs.latency, (1, total), *parts)

    def _chosen(self, x: np.ndarray, expert: int, source: int) -> int:
        return max(range(self.devices), key=lambda device: float(x[self.of("route", expert, source, device)]))
