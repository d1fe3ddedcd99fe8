"""Mixed-integer linear program of a plan: one state per node of a chain, at minimum cost, under a memory capacity.

Without a binding capacity it is a shortest path. Under one it is a resource-constrained shortest path: a Lagrange
multiplier on the weight gives a lower bound, combinations of the paths that it finds give a first solution, and
Pareto labels close the gap, which handles the identical blocks of a transformer well. If there are too many labels,
HiGHS solves the program written as a flow (Alpa's one-hot states and edge variables, arXiv 2201.12023, as in the
Oases paper, arXiv 2305.16121, section 4).
The flow into a node's state equals its state variable, and so does the flow out of it: without the capacity the
vertices of this polytope are paths, so the relaxation is as tight as the Lagrangian bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from time import perf_counter

import numpy as np

from oases.errors import UsageError
from oases.planner.block_chain import Array, Chain, DenseChain

TOLERANCE = 2e-6
"""Relative tolerance by which HiGHS may violate a row, with a margin."""
LEAST_GAP = 1e-6
"""Smallest relative gap that HiGHS can prove in double precision."""


def relaxed_cost(costs: Array, weights: Array, capacity: float) -> float:
    """Least average cost of nodes with these states whose average weight is within the capacity, edges left out.

    A lower bound: nodes may divide themselves among states. inf if every state weighs more.
    """
    light = weights <= capacity
    if not light.any():
        return float("inf")
    low, high = weights[light, None], weights[None, ~light]
    share = (capacity - low) / (high - low)
    mixed = costs[light, None] * (1 - share) + costs[None, ~light] * share
    return float(min(costs[light].min(), mixed.min(initial=np.inf)))


def solve_flow(
    chain: DenseChain, capacity: float, gap: float, time_limit: float
) -> tuple[list[int] | None, float, float]:
    """Places, cost and a lower bound; no places if nothing was found within the capacity.

    capacity: finite. time_limit: in seconds.
    """
    places, cost, bound = _solve(chain, capacity, capacity, gap, time_limit)
    if places is None and cost < np.inf:  # the solution violates the capacity within the solver's tolerance
        limit = capacity - TOLERANCE * max(1.0, abs(capacity))
        places, cost, _ = _solve(chain, capacity, limit, gap, time_limit)
    return places, cost, bound


def _solve(
    chain: DenseChain, capacity: float, limit: float, gap: float, time_limit: float
) -> tuple[list[int] | None, float, float]:
    # Imported here: ranks of a training run read plans but solve none, and need no scipy.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, csr_array, eye_array, hstack, vstack

    nodes, most = chain.costs.shape
    node, state = np.nonzero(np.isfinite(chain.costs))
    number = np.full((nodes, most), -1)
    number[node, state] = np.arange(len(node))
    at, a, b = np.nonzero(np.isfinite(chain.edges) & (number[:-1, :, None] >= 0) & (number[1:, None, :] >= 0))
    size, ones, edge = (len(node), len(at)), np.ones(len(at)), np.arange(len(at))
    leave = hstack([eye_array(size[0]), -coo_array((ones, (number[at, a], edge)), size)], format="csr")
    enter = hstack([eye_array(size[0]), -coo_array((ones, (number[at + 1, b], edge)), size)], format="csr")
    one = np.concatenate([node == 0, np.zeros(len(at))])  # conservation carries the unit flow through the chain
    scale = max(1.0, abs(capacity))
    weigh = np.concatenate([chain.weights[node, state] / scale, np.zeros(len(at))])
    conserved = [leave[node < nodes - 1], enter[node > 0]]
    matrix = vstack([*conserved, csr_array(one[None, :]), csr_array(weigh[None, :])], format="csr")
    low, high = np.zeros((2, matrix.shape[0]))
    low[-2] = high[-2] = 1.0
    low[-1], high[-1] = -np.inf, limit / scale

    costs = np.concatenate([chain.costs[node, state], chain.edges[at, a, b]])
    largest = max(float(np.abs(costs).max()), 1e-300)  # the solver's tolerances are absolute
    result = milp(
        costs / largest,
        integrality=np.concatenate([np.ones(len(node)), np.zeros(len(at))]),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": max(gap, LEAST_GAP) / 2, "time_limit": time_limit},
    )
    infeasible = result.status == 2
    if infeasible:
        return None, np.inf, np.inf
    bound = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) * largest
    if result.x is None:
        return None, np.inf, bound
    chosen = np.flatnonzero(result.x[: len(node)] > 0.5)
    places = [int(place) for place in state[chosen]]
    cost = float(costs[chosen].sum()) + sum(float(chain.edges[i][pair]) for i, pair in enumerate(pairwise(places)))
    fits = chain.weights[np.arange(nodes), places].sum() <= capacity
    return (places if fits else None), cost, bound


GAP = 1e-9
"""Relative gap between cost and bound at which a solution counts as optimal: rounding."""
MAX_LABELS = 20_000
"""Labels per node beyond which HiGHS takes over."""
ROUNDING = 1e-12
"""Relative error of sums of the same numbers in another order."""


class InfeasibleError(UsageError):
    """Error for a chain without a choice of states within the capacity.

    smallest_weight: bytes of the lightest choice; infinite if forbidden edges leave none.
    """

    def __init__(self, smallest_weight: float, capacity: float | None) -> None:
        self.smallest_weight = smallest_weight
        if smallest_weight == np.inf:
            super().__init__("the chain has no path: forbidden edges exclude every choice of states")
        else:
            super().__init__(
                f"the lightest choice of states weighs {smallest_weight:.0f} bytes, the capacity is {capacity:.0f}: "
                "give more memory, or states that need less"
            )


@dataclass(frozen=True)
class Solution:
    """Optimal choice. states, places: by node. cost: seconds. weight: bytes. bound: lower bound of the cost.

    binds: the capacity excludes a cheaper choice. method: what closed the gap. seconds: solve time.
    """

    states: tuple[Hashable, ...]
    places: tuple[int, ...]
    cost: float
    weight: float
    bound: float
    binds: bool
    method: str
    seconds: float

    @property
    def gap(self) -> float:
        """Relative gap between cost and bound."""
        return max(0.0, self.cost - self.bound) / max(abs(self.cost), 1e-300)


def solve(chain: Chain, gap: float = GAP, max_labels: int = MAX_LABELS, time_limit: float = 60.0) -> Solution:
    """Find the cheapest choice within the capacity, optimal up to the relative `gap`. Raises InfeasibleError.

    max_labels: per node; 0 leaves what the bounds do not decide to HiGHS. time_limit: seconds for HiGHS; if it is
    reached, `Solution.gap` is the proven gap (HiGHS proves no less than 1e-6).
    """
    started = perf_counter()
    search = _Search(DenseChain.of(chain), chain.capacity, gap)
    method = search.bounds()
    if method is None:
        method = "labels"
        if not search.labels(max_labels):
            method = "milp"
            search.take(*solve_flow(search.undecided(), search.capacity, gap, time_limit))
    places = search.best
    cost = chain.cost_of(places)
    return Solution(
        tuple(states[place] for states, place in zip(chain.states, places, strict=True)), places, cost,
        chain.weight_of(places), min(search.bound, cost), cost > search.unlimited + gap * abs(cost), method,
        perf_counter() - started,
    )  # fmt: skip


class _Ways:
    """Shortest paths from every state to the chain's end, for cost + multiplier x weight; all arrays are NS.

    value: length of the path from a state, itself included. cost, weight: of that path. A multiplier of inf
    minimises the weight alone.
    """

    def __init__(self, chain: DenseChain, multiplier: float) -> None:
        self.multiplier = multiplier
        self._chain = chain
        if multiplier == np.inf:
            own = np.where(np.isinf(chain.costs), np.inf, chain.weights)
            edges = np.where(np.isinf(chain.edges), np.inf, 0.0)
        else:
            own, edges = chain.costs + multiplier * chain.weights, chain.edges
        self.value = own.copy()
        self.cost, self.weight = chain.costs.copy(), chain.weights.copy()
        self._next = np.zeros(own.shape, int)
        rows = np.arange(own.shape[1])
        for i in range(len(own) - 2, -1, -1):
            onward = edges[i] + self.value[i + 1]
            to = self._next[i] = onward.argmin(1)
            self.value[i] += onward[rows, to]
            self.cost[i] += chain.edges[i][rows, to] + self.cost[i + 1][to]
            self.weight[i] += self.weight[i + 1][to]

    @property
    def best(self) -> int:
        """First state of the best path."""
        return int(self.value[0].argmin())

    def path(self, node: int, state: int) -> list[int]:
        """States of the path from `node` on."""
        found = [state]
        for following in self._next[node:-1]:
            found.append(int(following[found[-1]]))
        return found

    @cached_property
    def reversed(self) -> _Ways:
        """Shortest paths from the chain's start to every state; rows count nodes from the end."""
        return _Ways(self._chain.reversed(), self.multiplier)


class _Search:
    """Search state: the best choice found, a lower bound, and the undecided rest."""

    def __init__(self, chain: DenseChain, capacity: float | None, gap: float) -> None:
        self.chain = chain
        self.capacity = np.inf if capacity is None else float(capacity)
        self.best: tuple[int, ...] = ()
        self.cost = np.inf
        self.bound = self.unlimited = -np.inf
        self._gap = gap
        self._ways: list[_Ways] = []

    @property
    def target(self) -> float:
        """Cost below which a choice is still worth finding."""
        return self.cost - 0.5 * self._gap * abs(self.cost) if self.cost < np.inf else np.inf

    def take(self, places: Sequence[int] | None, cost: float, bound: float) -> None:
        """Record a choice if it is better, and a bound on all undecided ones."""
        if places is not None and cost < self.cost:
            self.best, self.cost = tuple(places), cost
        self.bound = max(self.bound, min(bound, self.target))

    def bounds(self) -> str | None:
        """Compute the dual bound and the best combination of two of its paths. Returns a method's name if that is
        optimal.
        """
        cheapest, lightest = _Ways(self.chain, 0.0), _Ways(self.chain, np.inf)
        least = float(lightest.value[0].min())
        if least > self.capacity or least == np.inf:
            raise InfeasibleError(least, self.capacity)
        self.unlimited = self.bound = float(cheapest.value[0].min())
        self._ways = [lightest, cheapest]
        heavy, light = cheapest, lightest
        if self._note(cheapest):
            return "shortest path"
        self._note(lightest)
        while True:  # multiplier at which both paths are equal; finite: the hull has finitely many vertices
            a, b = heavy.best, light.best
            rise, width = light.cost[0, b] - heavy.cost[0, a], heavy.weight[0, a] - light.weight[0, b]
            multiplier = float(max(0.0, rise) / width)
            line = heavy.cost[0, a] + multiplier * heavy.weight[0, a]
            ways = _Ways(self.chain, multiplier)
            self._ways.append(ways)
            value = float(ways.value[0].min())
            self.bound = max(self.bound, value - multiplier * self.capacity)
            fits = self._note(ways)
            if value >= line - 1e-9 * abs(line):
                break
            heavy, light = (heavy, ways) if fits else (ways, light)
        self._cross()
        return "dual bound" if self.bound >= self.target else None

    def _note(self, ways: _Ways) -> bool:
        state = ways.best
        fits = bool(ways.weight[0, state] <= self.capacity)
        if fits and ways.cost[0, state] < self.cost:
            self.take(ways.path(0, state), float(ways.cost[0, state]), -np.inf)
        return fits

    def _cross(self) -> None:
        """Best path that starts as one path and continues as another, over all edges."""
        edges = self.chain.edges
        for before in [ways.reversed for ways in self._ways]:
            cost = before.cost[:0:-1, :, None] + edges
            weight = before.weight[:0:-1, :, None]
            for after in self._ways:
                total = cost + after.cost[1:, None, :]
                total[weight + after.weight[1:, None, :] > self.capacity] = np.inf
                if total.size and total.min() < self.cost:
                    i, a, b = (int(place) for place in np.unravel_index(total.argmin(), total.shape))
                    start = before.path(len(edges) - i, a)[::-1]
                    self.take([*start, *after.path(i + 1, b)], float(total[i, a, b]), -np.inf)

    def undecided(self) -> DenseChain:
        """The chain without edges that no better choice can use."""
        edges = self.chain.edges.copy()
        for ways in self._ways:
            through = ways.reversed.value[:0:-1, :, None] + ways.value[1:, None, :]
            if ways.multiplier == np.inf:
                edges[through > self.capacity * (1 + ROUNDING)] = np.inf
            else:
                edges[through + self.chain.edges > self.target + ways.multiplier * self.capacity] = np.inf
        return DenseChain(self.chain.costs, self.chain.weights, edges)

    def labels(self, most: int) -> bool:
        """Extend all Pareto-optimal prefixes (labels) node by node, pruned by the best choice. Returns False above
        `most`.
        """
        chain = self.undecided()
        first = np.flatnonzero(np.isfinite(chain.costs[0]))
        cost, weight, state = chain.costs[0, first], chain.weights[0, first], first
        kept: list[tuple[Array, Array]] = []  # by node: states of its labels, and their parents
        parent = np.zeros_like(first)
        for i in range(len(chain.costs)):
            if i > 0:
                cost, weight, state, parent = self._extended(chain, i, cost, weight, state)
            if len(cost) > most:
                return False
            kept.append((state, parent))
            self._complete(i, cost, weight, kept)
            if not len(cost):
                break
        self.bound = max(self.bound, self.target)
        return True

    def _extended(self, chain: DenseChain, i: int, cost: Array, weight: Array, state: Array) -> tuple[Array, ...]:
        """Labels of node i that extend those of the previous node: cost, weight, state and parent."""
        found: list[tuple[Array, ...]] = []
        for b in np.flatnonzero(np.isfinite(chain.costs[i])):
            costs = cost + chain.edges[i - 1][state, b] + chain.costs[i, b]
            weights = weight + chain.weights[i, b]
            hopeful = np.isfinite(costs)
            for ways in self._ways:
                if ways.multiplier == np.inf:
                    hopeful &= weights - chain.weights[i, b] + ways.value[i, b] <= self.capacity * (1 + ROUNDING)
                else:
                    own = chain.costs[i, b] + ways.multiplier * chain.weights[i, b]
                    bound = costs + ways.multiplier * (weights - self.capacity) + (ways.value[i, b] - own)
                    hopeful &= bound < self.target
            parent = np.flatnonzero(hopeful)
            costs, weights = costs[parent], weights[parent]
            order = np.lexsort((costs, weights))
            costs, weights, parent = costs[order], weights[order], parent[order]
            cheaper = np.ones(len(costs), bool)
            cheaper[1:] = costs[1:] < np.minimum.accumulate(costs)[:-1]
            found.append((costs[cheaper], weights[cheaper], np.full(cheaper.sum(), b), parent[cheaper]))
        return tuple(map(np.concatenate, zip(*found, strict=True))) if found else (np.empty(0),) * 4

    def _complete(self, i: int, cost: Array, weight: Array, kept: list[tuple[Array, Array]]) -> None:
        """Complete every label of node i with the shortest paths from its state."""
        state = kept[-1][0]
        for ways in self._ways:
            own_cost, own_weight = self.chain.costs[i, state], self.chain.weights[i, state]
            total = cost - own_cost + ways.cost[i, state]
            total[weight - own_weight + ways.weight[i, state] > self.capacity] = np.inf
            if not len(total) or total.min() >= self.cost:
                continue
            label = int(total.argmin())
            onward = ways.path(i, int(state[label]))
            start, at = [], label
            for states, parents in reversed(kept):
                start.append(int(states[at]))
                at = int(parents[at])
            self.take([*reversed(start), *onward[1:]], float(total[label]), -np.inf)
