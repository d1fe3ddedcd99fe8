"""Parts of a graph: consecutive nodes, and the values that cross between them.

A shard passes a single value to the next. Merak cuts where a shard exceeds its target and then merges shards that a
value skips over. Here a shard that exceeds its target extends to the next border that a single value crosses, so
nothing has to be merged and no shard is larger than after merging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph, Node, Parameter, Run

MANY_USERS = 5
"""Users above which a value may cross any border, as masks and position ids do."""


@dataclass(frozen=True)
class Value:
    """Value that crosses a border. along: in addition to the one it is cut at. trained: its gradient is sent back."""

    name: str
    num_bytes: int
    along: bool
    trained: bool


@dataclass(frozen=True)
class Part(Run):
    """Nodes from `start` up to `stop` of a graph."""

    graph: LayerGraph = field(repr=False, compare=False)
    start: int
    stop: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes in execution order."""
        return self.graph.nodes[self.start : self.stop]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters that its nodes read, each tensor once under its first name, without buffers."""
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
        """Whether it contains an embedding lookup."""
        return any(is_embedding(self.graph, node) for node in self.nodes)


def is_embedding(graph: LayerGraph, node: Node) -> bool:
    """Whether a node is a lookup in a parameter."""
    looks_up = node.op in ("aten.embedding", "aten.embedding_bag")
    return looks_up and any(not graph.table[name].buffer for name in node.parameters)


def last_uses(graph: LayerGraph) -> dict[str, int]:
    """Index of the last node that reads each value; its own index if none does."""
    return {name: users[-1] if users else graph.place.get(name, 0) for name, users in graph.users.items()}


def travels(graph: LayerGraph) -> frozenset[str]:
    """Values that may cross any border and do not prevent a cut there.

    Model inputs, values computed from them without parameters (masks, position ids, rotations), and values with
    more than MANY_USERS users (the encoder's output in the decoder, position biases).
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
    """Values that cross each border, given as the index of the first node after it.

    A model input crosses from the first part that uses it to later ones that do.
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
    """Shards of a graph, in order; together they hold each node once.

    Their target size is the non-embedding parameters divided by `count`, by default 2 L + 4 for L layers. An
    embedding is a shard of its own. Values in `travels` may cross anywhere.
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
    """Finest possible shards: each reads parameters and passes on one value."""
    if not graph.nodes:
        return ()
    reads = [any(not graph.table[name].buffer for name in node.parameters) for node in graph.nodes]
    ahead = list(accumulate(reads, initial=0))  # by border: nodes before it that read parameters
    best: dict[int, tuple[int, int]] = {}
    for border, num_bytes in clean_borders(graph).items():
        if 0 < ahead[border] < ahead[-1]:
            known = best.setdefault(ahead[border], (num_bytes, border))
            if num_bytes < known[0]:
                best[ahead[border]] = num_bytes, border
    borders = sorted(border for _, border in best.values())
    return tuple(Part(graph, *ends) for ends in pairwise([0, *borders, len(graph.nodes)]))


def clean_borders(graph: LayerGraph) -> dict[int, int]:
    """Borders at which a graph may be cut: index of the first node after it -> bytes of the value that crosses.

    At most one value crosses there, apart from those in `travels`.
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
