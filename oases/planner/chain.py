"""Chain of blocks to plan: one state per block, at minimum cost, under a memory capacity.

Without a binding capacity it is a shortest path; under one a resource-constrained shortest path, the integer program
of the Oases paper (arXiv 2305.16121, section 4). Paths from the start are extended block by block; of those to one
state with no less weight the cheaper stays. What the best completions cannot bring within capacity or below the best
known cost is dropped: the cheapest ones, the lightest, and those between by Lagrange multipliers. Blocks of a
transformer are alike, so few paths are left: HiGHS takes 1 to 12 s for chains of several degrees, this 10 to 80 ms,
and a search solves hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from oases.errors import UsageError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

GAP = 1e-9
"""Relative gap at which a choice counts as optimal: rounding."""
ROUNDING = 1e-12
"""Relative error of sums of the same numbers in another order."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Sequence of nodes, each of which is assigned one of its states.

    states: by node. costs: seconds of each state, by node. weights: bytes of each state, by node. edges: for each
    pair of adjacent nodes a matrix of seconds, states of the first by states of the second; inf forbids a pair.
    capacity: maximum total bytes; inf for no limit.
    """

    states: tuple[tuple[Hashable, ...], ...]
    costs: tuple[Array, ...]
    weights: tuple[Array, ...]
    edges: tuple[Array, ...]
    capacity: float = np.inf

    def __post_init__(self) -> None:
        counts = [len(states) for states in self.states]
        if not counts or not all(counts):
            raise UsageError(f"chain: every node needs a state; the nodes have {counts}")
        for name, found in (("costs", self.costs), ("weights", self.weights)):
            if [np.shape(each) for each in found] != [(count,) for count in counts]:
                raise UsageError(f"chain: {name} must hold one number for each of the states, {counts} by node")
        pairs = list(pairwise(counts))
        if [np.shape(each) for each in self.edges] != pairs:
            raise UsageError(f"chain: edges must be matrices of the shapes {pairs}")
        if any(np.isnan(each).any() for each in (*self.costs, *self.weights, *self.edges)):
            raise UsageError("chain: costs, weights and edges must be numbers; one of them is nan")

    @staticmethod
    def made(
        states: Sequence[Sequence[Hashable]],
        node_cost: Callable[[int, Any], float],
        weight: Callable[[int, Any], float],
        edge_cost: Callable[[int, Any, Any], float],
        capacity: float = np.inf,
    ) -> Chain:
        """Build a chain from functions.

        states: of each node. node_cost: seconds of (node, state). weight: whole bytes of (node, state). edge_cost:
        seconds of (node, its state, state of the next node); inf forbids the pair.
        """
        by_node = tuple(map(tuple, states))
        return Chain(
            by_node,
            tuple(np.array([node_cost(i, a) for a in node], float) for i, node in enumerate(by_node)),
            tuple(np.array([weight(i, a) for a in node], float) for i, node in enumerate(by_node)),
            tuple(
                np.array([[edge_cost(i, a, b) for b in after] for a in before], float)
                for i, (before, after) in enumerate(pairwise(by_node))
            ),
            capacity,
        )

    def cost_of(self, places: Sequence[int]) -> float:
        """Seconds of a choice, given as the index of each node's state."""
        nodes = sum(float(cost[place]) for cost, place in zip(self.costs, places, strict=True))
        return nodes + sum(float(self.edges[i][pair]) for i, pair in enumerate(pairwise(places)))

    def weight_of(self, places: Sequence[int]) -> float:
        """Bytes of a choice."""
        return sum(float(weight[place]) for weight, place in zip(self.weights, places, strict=True))


class InfeasibleError(UsageError):
    """Error for a chain without a choice of states within the capacity.

    smallest_weight: bytes of the lightest choice; infinite if forbidden edges leave none. stage: whose blocks they
    are, in a pipeline.
    """

    def __init__(self, smallest_weight: float, capacity: float, stage: int = 0) -> None:
        self.smallest_weight, self.stage = smallest_weight, stage
        if smallest_weight == np.inf:
            super().__init__("the chain has no path: forbidden edges exclude every choice of states")
        else:
            super().__init__(
                f"the lightest choice of states weighs {smallest_weight:.0f} bytes, the capacity is {capacity:.0f}: "
                "give more memory, or states that need less"
            )


@dataclass(frozen=True)
class Solution:
    """Best choice. states, places: by node. cost: seconds. binds: the capacity excludes a cheaper choice."""

    states: tuple[Hashable, ...]
    places: tuple[int, ...]
    cost: float
    binds: bool


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


def solve(chain: Chain, gap: float = GAP) -> Solution:
    """Find the cheapest choice within the capacity, optimal up to the relative `gap`. Raises InfeasibleError."""
    lightest, cheapest = _Completions(chain, np.inf), _Completions(chain, 0.0)
    least = float(lightest.value[0].min())
    if least > chain.capacity or least == np.inf:
        raise InfeasibleError(least, chain.capacity)
    places = cheapest.path(0, cheapest.best)
    if cheapest.weight[0][cheapest.best] > chain.capacity:
        places = _within(chain, _between(chain, lightest, cheapest), gap)
    cost = chain.cost_of(places)
    return Solution(
        tuple(states[place] for states, place in zip(chain.states, places, strict=True)), tuple(places), cost,
        cost > float(cheapest.value[0].min()) + gap * abs(cost),
    )  # fmt: skip


class _Completions:
    """Best completions of a chain from every state: shortest paths for cost + multiplier x weight, by node.

    value: length of the path from a state, itself included. cost, weight: of that path. A multiplier of inf minimises
    the weight alone.
    """

    def __init__(self, chain: Chain, multiplier: float) -> None:
        self.multiplier = multiplier
        alone = multiplier == np.inf
        self.value = [
            np.where(np.isinf(cost), np.inf, weight) if alone else cost + multiplier * weight
            for cost, weight in zip(chain.costs, chain.weights, strict=True)
        ]
        self.cost, self.weight = [*chain.costs], [*chain.weights]
        self._next: list[Array] = []
        for i in range(len(chain.edges) - 1, -1, -1):
            edges = np.where(np.isinf(chain.edges[i]), np.inf, 0.0) if alone else chain.edges[i]
            onward = edges + self.value[i + 1]
            to = onward.argmin(1)
            rows = np.arange(len(to))
            self.value[i] = self.value[i] + onward[rows, to]
            self.cost[i] = self.cost[i] + chain.edges[i][rows, to] + self.cost[i + 1][to]
            self.weight[i] = self.weight[i] + self.weight[i + 1][to]
            self._next.insert(0, to)

    @property
    def best(self) -> int:
        """First state of the best path."""
        return int(self.value[0].argmin())

    def path(self, node: int, state: int) -> list[int]:
        """States of the path from `node` on."""
        found = [state]
        for following in self._next[node:]:
            found.append(int(following[found[-1]]))
        return found


def _between(chain: Chain, lightest: _Completions, cheapest: _Completions) -> list[_Completions]:
    """These completions and those of multipliers between them, up to the one with the best lower bound."""
    found, heavy, light = [lightest, cheapest], cheapest, lightest
    while True:  # multiplier at which both paths are equal; finite: the hull has finitely many vertices
        a, b = heavy.best, light.best
        rise, width = light.cost[0][b] - heavy.cost[0][a], heavy.weight[0][a] - light.weight[0][b]
        multiplier = float(max(0.0, rise) / width)
        line = heavy.cost[0][a] + multiplier * heavy.weight[0][a]
        made = _Completions(chain, multiplier)
        found.append(made)
        if made.value[0].min() >= line - 1e-9 * abs(line):
            return found
        heavy, light = (heavy, made) if made.weight[0][made.best] <= chain.capacity else (made, light)


def _within(chain: Chain, completions: Sequence[_Completions], gap: float) -> list[int]:
    """Places of the cheapest choice within the capacity."""
    best, target = list[int](), np.inf  # target: cost below which a choice is still worth finding
    kept: list[tuple[Array, Array]] = []  # by node: states of its paths, and the paths that they extend
    state = np.arange(len(chain.costs[0]))
    cost, weight, parent = np.zeros(len(state)), np.zeros(len(state)), state  # up to the node, without its own
    for i in range(len(chain.costs)):
        if i:
            before, cost, weight = state, cost + chain.costs[i - 1][state], weight + chain.weights[i - 1][state]
            states = np.arange(len(chain.costs[i]))
            state, parent = np.repeat(states, len(before)), np.tile(np.arange(len(before)), len(states))
            cost, weight = cost[parent] + chain.edges[i - 1][before[parent], state], weight[parent]
        hopeful = np.isfinite(cost)
        for each in completions:
            if each.multiplier == np.inf:
                hopeful &= weight + each.value[i][state] <= chain.capacity * (1 + ROUNDING)
            else:
                bound = cost + each.multiplier * (weight - chain.capacity) + each.value[i][state]
                hopeful &= bound < target
        order = np.flatnonzero(hopeful)
        order = order[np.lexsort((cost[order], weight[order], state[order]))]
        state, cost, weight, parent = state[order], cost[order], weight[order], parent[order]
        cheaper = _cheaper(state, cost)
        state, cost, weight, parent = state[cheaper], cost[cheaper], weight[cheaper], parent[cheaper]
        kept.append((state, parent))
        for each in completions:
            total = cost + each.cost[i][state]
            total[weight + each.weight[i][state] > chain.capacity] = np.inf
            if len(total) and (least := float(total.min())) < np.inf and (not best or least < target):
                at = int(total.argmin())
                onward, start = each.path(i, int(state[at])), list[int]()
                for node in range(i, 0, -1):
                    at = int(kept[node][1][at])
                    start.append(int(kept[node - 1][0][at]))
                best, target = [*reversed(start), *onward], least - 0.5 * gap * abs(least)
    return best


def _cheaper(state: Array, cost: Array) -> Array:
    """Mask of paths, sorted by state and weight, that are cheaper than all lighter ones to their state."""
    found = np.ones(len(cost), bool)
    starts = np.flatnonzero(np.diff(state)) + 1
    for first, last in pairwise([0, *starts, len(cost)]):
        found[first + 1 : last] = cost[first + 1 : last] < np.minimum.accumulate(cost[first:last])[:-1]
    return found
