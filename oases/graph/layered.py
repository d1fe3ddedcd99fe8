"""Model of a graph: its layers by kind, with their own costs, and what it computes outside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod

from oases.errors import UsageError
from oases.graph.layer_costs import Reading, blocks_of, flops_of, is_token_wise
from oases.graph.layer_graph import LayerGraph, Node, layer_of
from oases.plans.layered import Block, LayerKind, LayerList, Model, Outside, Share
from oases.plans.shape import ELEMENT_BYTES


def layered_model(graph: LayerGraph, alike: Mapping[str, str] | None = None) -> Model:
    """Costs of a graph's layers. alike: layers that were not traced, each with a traced one of equal costs.

    Exact: parameters, FLOPs of matmuls and attention, bytes of activations between layers. By rule: which activations
    the backward pass keeps (those that torch's formulas read), and what is sharded (see `oases.graph.layer_costs`).
    Raises UsageError for a model without lists of layers, and for layers that hand on activations of different sizes.
    """
    alike, reading = alike or {}, Reading(graph)
    nodes: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if layer := layer_of(node.module):
            nodes.setdefault(layer, []).append(node)
    paths = [path for path in nodes if path in alike or any(reading.matrices(node) for node in nodes[path])]
    if not paths:
        raise _unfit(graph, "it has no list of layers that it calls one after the other")
    of_paths = [alike.get(path, path) for path in paths]
    kinds: dict[tuple[Block, ...], int] = {}
    found: dict[str, int] = {}
    names: list[str] = []
    units: dict[str, tuple[int, ...]] = {}
    token_wise = True
    for path in paths:
        of = alike.get(path, path)
        if of not in found:
            start = _entry(graph, nodes[of])
            blocks = tuple(blocks_of(reading, nodes[of], start))
            units[of] = _shape(graph, start)
            token_wise = token_wise and len(units[of]) == 3 and is_token_wise(reading, nodes[of], start)
            found[of] = kinds.setdefault(blocks, len(kinds))
            if found[of] == len(names):
                names.append(of)
    if len({prod(shape) for shape in units.values()}) > 1:
        sizes = ", ".join(f"{path}: {'x'.join(map(str, shape))}" for path, shape in units.items())
        raise _unfit(graph, f"its layers get activations of different sizes ({sizes})")
    shape = next(iter(units.values()))
    batch = max(1, graph.inputs[0].shape[0] if graph.inputs and graph.inputs[0].shape else 1)
    if batch != 1:
        raise _unfit(graph, f"it was traced with a batch of {batch}, and costs are those of one sample; trace one")
    firsts = [graph.place[nodes[path][0].name] for path in paths]
    dtype = next((p.dtype for p in graph.parameters if p.dtype in ELEMENT_BYTES), "float32")
    vocabulary = _vocabulary(graph)
    return Model(
        name=graph.name, dtype=dtype, sequence=max(1, prod(shape) // shape[-1]), hidden=shape[-1], unit=prod(shape),
        vocabulary=vocabulary, num_parameters=graph.num_parameters,
        lists=tuple(
            LayerList(path, len(list(run))) for path, run in groupby(paths, lambda each: each.rpartition(".")[0])
        ),
        kinds=tuple(LayerKind(name, blocks) for name, blocks in zip(names, kinds, strict=True)),
        order=tuple(found[path] for path in of_paths),
        outside=_outside(reading, set(paths), firsts, vocabulary),
        messages=_messages(reading, *([nodes[each] for each in names] for names in (paths, of_paths))),
        token_wise=token_wise,
    )  # fmt: skip


def _entry(graph: LayerGraph, nodes: Sequence[Node]) -> str:
    """Value that a layer gets from the one before: the latest trained one from outside of it."""
    own = {node.name for node in nodes}
    given = {name for node in nodes for name in node.inputs if name not in own and name in graph.trained}
    if not given:
        raise _unfit(graph, f"its layer {layer_of(nodes[0].module)} reads no activation")
    return max(given, key=lambda name: graph.place[name])


def _messages(
    reading: Reading, layers: Sequence[Sequence[Node]], traced: Sequence[Sequence[Node]]
) -> tuple[int, ...]:
    """Bytes of values with gradients that cross the border before each layer, views once.

    traced: the nodes that stand for each layer, whose reads of values from elsewhere count as the layer's own.
    """
    graph = reading.graph
    last: dict[str, int] = {}
    for name, use in last_uses(graph).items():
        base = reading.base.get(name, name)
        last[base] = max(last.get(base, 0), use)
    for own, nodes in zip(layers, traced, strict=True):
        if own is not nodes:
            entry, first = _entry(graph, nodes), graph.place[own[0].name]
            made = {node.name for node in nodes}
            for name in {name for node in nodes for name in node.inputs} - made - {entry}:
                base = reading.base.get(name, name)
                last[base] = max(last.get(base, 0), first)
    crossing = [
        (graph.place[name], use, graph.value_bytes[name]) for name, use in last.items() if name in graph.trained
    ]
    firsts = [graph.place[nodes[0].name] for nodes in layers]
    found = [sum(size for born, use, size in crossing if born < first <= use) for first in firsts]
    return (0, *found[1:])


def last_uses(graph: LayerGraph) -> dict[str, int]:
    """Index of the last node that reads each value; its own index if none does."""
    last = dict.fromkeys((each.name for each in graph.inputs), 0) | graph.place
    for index, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.inputs, index))
    return last


def is_embedding(graph: LayerGraph, node: Node) -> bool:
    """Whether a node is a lookup in a parameter."""
    return Reading.is_lookup(node) and any(not graph.table[name].buffer for name in node.parameters)


def _shape(graph: LayerGraph, value: str) -> tuple[int, ...]:
    return graph.nodes[graph.place[value]].shapes[0]


def _vocabulary(graph: LayerGraph) -> int:
    """Rows of the largest table that a model input is looked up in; 0 without one."""
    given = {each.name for each in graph.inputs}
    rows = [0]
    for node in graph.nodes:
        if is_embedding(graph, node) and not given.isdisjoint(node.inputs):
            rows += [graph.table[name].shape[0] for name in node.parameters]
        elif not node.bytes_out and len(node.inputs) == 1 and node.inputs[0] in given:
            given.add(node.name)  # a view of an input
    return max(rows)


def _outside(reading: Reading, layers: set[str], firsts: Sequence[int], vocabulary: int) -> tuple[Outside, ...]:
    """Work before each layer and after the last one. Parameters that nothing reads come first."""
    graph = reading.graph
    parts: dict[int, list[Node]] = {0: []}
    last = max(graph.place[node.name] for node in graph.nodes if layer_of(node.module) in layers)
    for node in graph.nodes:
        if layer_of(node.module) not in layers:
            at = graph.place[node.name]
            parts.setdefault(len(firsts) if at > last else sum(first < at for first in firsts), []).append(node)
    read = {p.identity for nodes in parts.values() for node in nodes for p in reading.parameters(node)}
    read |= {p.identity for p in graph.parameters if layer_of(p.name) in layers}
    unread = {p.identity: p.size for p in graph.parameters if not p.buffer and p.identity not in read}
    tables: set[int] = set()
    found = []
    for before, nodes in sorted(parts.items()):
        whole, cut, logits, tied = _Sum(), _Sum(), 0, 0
        counted: set[int] = set()
        whole.parameters += 0 if before else sum(unread.values())
        for node in nodes:
            flops = flops_of(node, graph)
            mine = [each for each in reading.parameters(node) if each.identity not in counted]
            counted |= {each.identity for each in mine}
            rows = [each for each in reading.parameters(node) if vocabulary and each.shape[0] == vocabulary]
            to = cut if rows and (flops or is_embedding(graph, node)) else whole
            to.column += flops
            to.moved += reading.moved(node)
            if flops:
                logits = max(logits, prod(node.shapes[0]))
            for each in mine:
                if to is cut and each in rows:
                    cut.parameters += each.size
                    tied += each.size if each.identity in tables else 0
                    tables.add(each.identity)
                else:
                    whole.parameters += each.size
        shares = (
            Share(units, units > 1, parameters=each.parameters, column=each.column, moved=each.moved)
            for units, each in ((1, whole), (max(1, vocabulary), cut))
        )
        made = tuple(share for share in shares if share.parameters or share.column or share.moved)
        if made:
            found.append(Outside(before, made, logits, tied))
    return tuple(found)


class _Sum:
    """Parameters, FLOPs and bytes moved, to be added up."""

    parameters = column = moved = 0


def _unfit(graph: LayerGraph, why: str) -> UsageError:
    return UsageError(f"{graph.name} cannot be planned: {why}; give the sizes of a GPT like it")
