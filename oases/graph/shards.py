"""Cuts a graph into shards, after Merak (Lai et al., 2023, arXiv:2206.04959): consecutive nodes of about equal size.

A shard hands one value to the next. Merak cuts where a shard is over its target and merges shards back that a value
skips over. Here a shard that is over its target goes on to the next place that only one value crosses: what would be
merged is never cut, and no shard is larger than merging makes it.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph
from oases.graph.part import Part, is_embedding, last_uses, travels


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
