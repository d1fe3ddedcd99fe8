"""A run of consecutive nodes of a graph, and the values that cross from one run into later ones.

A shard hands one value to the next. Merak cuts where a shard is over its target and merges shards back that a value
skips over. Here a shard that is over its target goes on to the next place that only one value crosses: what would be
merged is never cut, and no shard is larger than merging makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph, Node, Parameter, Run

MANY_USERS = 5
"""Of a value with more users than this: it travels along, as masks and position ids do."""


@dataclass(frozen=True)
class Value:
    """A value that crosses a border. along: beside the one it is cut at. trained: its gradient comes back."""

    name: str
    num_bytes: int
    along: bool
    trained: bool


@dataclass(frozen=True)
class Part(Run):
    """Nodes `start` up to `stop` of a graph."""

    graph: LayerGraph = field(repr=False, compare=False)
    start: int
    stop: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In execution order."""
        return self.graph.nodes[self.start : self.stop]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters that its nodes read, each tensor once, under the name it is first read by; no buffers."""
        found: dict[int, Parameter] = {}
        for node in self.nodes:
            for each in (self.graph.table[name] for name in node.parameters):
                if not each.buffer:
                    found.setdefault(each.identity, each)
        return tuple(found.values())

    @property
    def num_parameters(self) -> int:
        """Elements of its parameters."""
        return sum(each.size for each in self.parameters)

    @cached_property
    def embedding(self) -> bool:
        """Whether it looks rows up in a parameter."""
        return any(is_embedding(self.graph, node) for node in self.nodes)


def is_embedding(graph: LayerGraph, node: Node) -> bool:
    """Whether a node looks rows up in a parameter."""
    looks_up = node.op in ("aten.embedding", "aten.embedding_bag")
    return looks_up and any(not graph.table[name].buffer for name in node.parameters)


def last_uses(graph: LayerGraph) -> dict[str, int]:
    """The index of the last node that reads each value; that of its own node where none does."""
    return {name: users[-1] if users else graph.place.get(name, 0) for name, users in graph.users.items()}


def travels(graph: LayerGraph) -> frozenset[str]:
    """The values that may cross any border, and so are no reason not to cut.

    Model inputs, what is computed of them and of no parameter (masks, position ids, rotations), and what has more
    than MANY_USERS users (the encoder's output in the decoder, position biases).
    """
    many = (name for name, users in graph.users.items() if len(users) > MANY_USERS)
    free = set(many) | {each.name for each in graph.inputs}
    bound: set[str] = set()
    for node in graph.nodes:
        if any(not graph.table[name].buffer for name in node.parameters) or not bound.isdisjoint(node.inputs):
            bound.add(node.name)
        else:
            free.add(node.name)
    return frozenset(free)


def crossing(graph: LayerGraph, borders: Sequence[int]) -> list[tuple[Value, ...]]:
    """The values that cross each border, given as the index of the first node behind it.

    A model input crosses from the part that uses it first to the later ones that do.
    """
    free, last = travels(graph), last_uses(graph)
    values = [
        (users[0], last[each.name], each.name) for each in graph.inputs if (users := graph.users[each.name])
    ] + [(index, last[node.name], node.name) for index, node in enumerate(graph.nodes)]
    return [
        tuple(
            Value(name, graph.value_bytes[name], name in free, name in graph.trained)
            for born, used, name in values
            if born < border <= used
        )
        for border in borders
    ]


def shards(graph: LayerGraph, count: int | None = None) -> tuple[Part, ...]:
    """The shards of a graph, in order; together they hold each node once.

    The target is the parameters that are no embedding's, divided by `count`: None takes 2 L + 4 of L layers. An
    embedding is a shard of its own. Values that travel along (`travels`) may cross anywhere.
    """
    if count is None:
        count = 2 * len(graph.layers) + 4
    if count < 1:
        raise UsageError(f"count of shards must be at least 1, got {count}")
    looked_up = {
        graph.table[name].identity for node in graph.nodes if is_embedding(graph, node) for name in node.parameters
    }
    sizes = {each.identity: each.size for each in graph.parameters if not each.buffer}
    target = sum(size for identity, size in sizes.items() if identity not in looked_up) / count
    found: list[Part] = []
    start, held = 0, 0
    for unit in units(graph):
        if unit.embedding and start < unit.start:
            found.append(Part(graph, start, unit.start))
            start, held = unit.start, 0
        held += unit.num_parameters
        if unit.embedding or held > target:
            found.append(Part(graph, start, unit.stop))
            start, held = unit.stop, 0
    if start < len(graph.nodes):
        found.append(Part(graph, start, len(graph.nodes)))
    return tuple(found)


def units(graph: LayerGraph) -> tuple[Part, ...]:
    """The finest shards there are: each reads parameters and hands on one value, the first smallest it can."""
    if not graph.nodes:
        return ()
    reads = [any(not graph.table[name].buffer for name in node.parameters) for node in graph.nodes]
    ahead = list(accumulate(reads, initial=0))  # of each border, how many nodes before it read parameters
    best: dict[int, tuple[int, int]] = {}
    for border, num_bytes in clean_borders(graph).items():
        if 0 < ahead[border] < ahead[-1]:
            known = best.setdefault(ahead[border], (num_bytes, border))
            if num_bytes < known[0]:
                best[ahead[border]] = num_bytes, border
    borders = sorted(border for _, border in best.values())
    return tuple(Part(graph, *ends) for ends in pairwise([0, *borders, len(graph.nodes)]))


def clean_borders(graph: LayerGraph) -> dict[int, int]:
    """Where a graph may be cut: the index of the first node behind it -> bytes of the value that crosses.

    There at most one value crosses, but for those that travel along.
    """
    last, free = last_uses(graph), travels(graph)
    ends: dict[int, list[str]] = {}
    alive: set[str] = set()
    found = {}
    for index, node in enumerate(graph.nodes):
        if node.name not in free and last[node.name] > index:
            alive.add(node.name)
            ends.setdefault(last[node.name], []).append(node.name)
        alive.difference_update(ends.pop(index, ()))
        if len(alive) <= 1:
            found[index + 1] = sum(graph.value_bytes[name] for name in alive)
    found.pop(len(graph.nodes), None)
    return found
