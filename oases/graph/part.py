"""A run of consecutive nodes of a graph, and the values that cross from one run into later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
