"""Chain of blocks to plan: for each node its possible states, with costs, weights and transition costs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from oases.core.schedule import WHOLE
from oases.errors import UsageError
from oases.planner.space import Space
from oases.plans.expert_schedules import exchanging
from oases.plans.layered import Kind, Model
from oases.plans.plan import Segment
from oases.simulator.engine import run
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.lowering import program_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, eq=False)
class Chain:
    """Sequence of nodes, each of which is assigned one of its states.

    states: by node. costs: seconds of each state, by node. weights: bytes of each state, by node. edges: for each
    pair of adjacent nodes a matrix of seconds, states of the first by states of the second; inf forbids a pair.
    capacity: maximum total bytes; None for no limit.
    """

    states: tuple[tuple[Hashable, ...], ...]
    costs: tuple[Array, ...]
    weights: tuple[Array, ...]
    edges: tuple[Array, ...]
    capacity: float | None = None

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
        capacity: float | None = None,
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


@dataclass(frozen=True)
class DenseChain:
    """Chain as three arrays, padded with states of infinite cost: costs and weights NS, edges NSS."""

    costs: Array
    weights: Array
    edges: Array

    @staticmethod
    def of(chain: Chain) -> DenseChain:
        """Convert a chain to arrays, without dominated states."""
        nodes, most = len(chain.states), max(map(len, chain.states))
        costs, weights = np.full((nodes, most), np.inf), np.zeros((nodes, most))
        edges = np.full((nodes - 1, most, most), np.inf)
        for i, (cost, weight) in enumerate(zip(chain.costs, chain.weights, strict=True)):
            costs[i, : len(cost)], weights[i, : len(cost)] = cost, weight
        for i, edge in enumerate(chain.edges):
            edges[i, : len(edge), : len(edge[0])] = edge
        return DenseChain(costs, weights, edges).undominated()

    def undominated(self) -> DenseChain:
        """Remove dominated states: another state of the node has no larger cost, weight or edge cost."""
        costs = self.costs.copy()
        edges = self.edges.copy()
        for i, (cost, weight) in enumerate(zip(costs, self.weights, strict=True)):
            better = (cost[:, None] <= cost) & (weight[:, None] <= weight)  # RS: R is at least as good as S
            if i > 0:
                better &= (edges[i - 1][:, :, None] <= edges[i - 1][:, None, :]).all(0)
            if i < len(edges):
                better &= (edges[i][:, None, :] <= edges[i][None, :, :]).all(2)
            gone = (better & (np.triu(better, 1) | ~better.T)).any(0)  # of equal states the first is kept
            costs[i, gone] = np.inf
            if i > 0:
                edges[i - 1][:, gone] = np.inf
            if i < len(edges):
                edges[i][gone] = np.inf
        return DenseChain(costs, self.weights, edges)

    def reversed(self) -> DenseChain:
        """The chain in reverse order."""
        return DenseChain(self.costs[::-1], self.weights[::-1], self.edges[::-1].transpose(0, 2, 1))


SEQUENCE_GAIN = 0.01
"""Minimum relative gain of sequence parallelism, whose further kernels are not all priced."""
_LAYERS = (2, 4)
"""Numbers of layers of the two simulated stacks whose difference is the time per layer."""


class Way(NamedTuple):
    """Way to run a stack: schedule, sub-batches, and whether along the sequence between blocks."""

    schedule: str
    sub_batches: int
    sequence_parallel: bool = False


@dataclass(frozen=True)
class StackTiming:
    """Fastest way to run a stack of one degree: seconds per additional layer and constant seconds, both passes.

    by_kind: seconds per additional layer of each kind; layer_seconds: mean over the model's layers.
    """

    way: Way
    by_kind: tuple[float, ...]
    layer_seconds: float
    fixed_seconds: float


class StackTimings:
    """Cache of the fastest schedule for every degree, number of samples and recomputation."""

    def __init__(self, model: Model, hardware: Hardware, space: Space) -> None:
        self.model = model
        self.hardware = hardware
        self.space = space
        self._fastest: dict[tuple[int, float, bool, str], StackTiming] = {}

    def fastest(self, tp: int, samples: float, *, recompute: bool, wire: str = "none") -> StackTiming:
        """For a stack of degree `tp` on `samples` samples, with recomputation or without."""
        key = (tp, samples, recompute, wire)
        if key not in self._fastest:
            self._fastest[key] = min((self._simulated(key, way) for way in self.ways(tp, samples)), key=self._cost)
        return self._fastest[key]

    def _cost(self, timing: StackTiming) -> float:
        seconds = timing.layer_seconds + timing.fixed_seconds / self.model.layers
        return seconds * (1 + SEQUENCE_GAIN) if timing.way.sequence_parallel else seconds

    def ways(self, tp: int, samples: float) -> list[Way]:
        """Ways in which such a stack can run."""
        if tp == 1 and not self.model.expert_parallel:
            return [Way("fine_grained", 1)]  # nothing is sent, so nothing is cut
        whole = [Way(name, 1) for name in self.space.schedules if name in WHOLE]
        counts = [count for count in self.space.sub_batches if count <= samples]
        cut = [Way(name, s) for name in self.space.schedules if name not in WHOLE for s in counts]
        found = whole + cut or [Way("fine_grained", 1)]  # a batch that cannot be cut runs whole
        if not self.model.token_wise or self.model.sequence % tp:
            return found
        return [way._replace(sequence_parallel=along) for along in self.space.sequence_parallel for way in found]

    def _simulated(self, key: tuple[int, float, bool, str], way: Way) -> StackTiming:
        order = self.model.layer_order
        by_kind, fixed = [], []
        for kinds in self.model.layer_kinds:
            short, long = (self._stack_seconds(key, way, kinds, layers) for layers in _LAYERS)
            layer = (long - short) / (_LAYERS[1] - _LAYERS[0])
            by_kind.append(layer)
            fixed.append(short - _LAYERS[0] * layer)
        mean = sum(order.count(kind) * seconds for kind, seconds in enumerate(by_kind)) / len(order)
        return StackTiming(way, tuple(by_kind), mean, fixed[order[0]])

    def _stack_seconds(
        self, key: tuple[int, float, bool, str], way: Way, layer: Sequence[Kind], layers: int
    ) -> float:
        tp, samples, recompute, wire = key
        numbers = tuple(number for number in range(layers) for _ in layer)
        segment = Segment(len(numbers), tp, way.schedule, way.sub_batches, layers * recompute, way.sequence_parallel)
        kinds = [*layer] * layers
        sends = [b for b, kind in enumerate(kinds) if self.model.expert_parameters(kind)]
        schedule = exchanging(segment.generated(numbers), sends)
        costs = stack_costs(self.hardware, self.model, kinds, tp, samples, schedule, wire)
        return run(program_of(schedule, costs)).total_seconds
