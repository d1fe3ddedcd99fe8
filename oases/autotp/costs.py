"""Costs of a traced model's layers for the planner: blocks by kind of layer, and what is computed outside of them.

A block ends where a result is added to the activation between layers: there its row-parallel matmuls are summed over
the ranks. In a block a matmul that no other follows is row-parallel, those that feed it directly are column-parallel
(Megatron's pairs, arXiv 1909.08053), and what lies between them is sharded alike. All else is computed by every rank:
also a pair with a norm over all of its features in between (OLMo). What has no sum is part of the block behind it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby, pairwise
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from oases.autotp.configuration import configured_model, read_configuration
from oases.autotp.model_graph import Inputs, LayerGraph, Node, Progress, layer_of, layers_once, trace
from oases.errors import UsageError
from oases.plans.layered import Block, LayerKind, LayerList, Model, Outside, Share
from oases.plans.shape import ELEMENT_BYTES

_ADDS = ("aten.add", "aten.add_")
_ATTENTION = ("aten.scaled_dot_product_attention", "aten.softmax", "aten._softmax")
_KEEP_INPUTS = frozenset(
    f"aten.{name}"
    for name in (
        "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "einsum", "_grouped_mm", "pow", "silu", "gelu", "relu",
        "sin", "cos", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "conv1d", "conv2d", "erf", "abs",
        "scaled_dot_product_attention", "softplus", "hardtanh", "leaky_relu", "elu", "log", "var",
    )
) | {"transformers.grouped_mm_fallback"}  # fmt: skip
"""Ops whose backward pass reads their inputs."""
_KEEP_OUTPUTS = frozenset(
    f"aten.{name}"
    for name in (
        "softmax", "_softmax", "log_softmax", "sigmoid", "tanh", "rsqrt", "sqrt", "exp", "reciprocal",
        "scaled_dot_product_attention",
    )
)  # fmt: skip
"""Ops whose backward pass reads their result."""
_KEEP_OTHERS = ("aten.mul", "aten.mul_", "aten.div", "aten.div_", "aten.where")
"""Products: the gradient of an input reads the others."""
_MASKED = ("aten.dropout", "aten.native_dropout", "aten.dropout_")

_OVER_FEATURES = ("aten.mean", "aten.var", "aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm")

_NUMBERS = tuple(each.name for each in fields(Share) if each.name not in ("units", "optional"))

Key = tuple[int, bool]
"""(units, optional) of a Share."""
_WHOLE: Key = (1, False)


def _kept(graph: LayerGraph, node: Node) -> list[str]:
    """Values (as bases) that a node's backward pass reads."""
    trained = graph.trained
    if node.name not in trained:
        return []
    found: list[str] = []
    reads = [name for name in node.inputs if name not in graph.weights]
    if node.op in _KEEP_INPUTS or node.flops:
        found += reads
    if node.op in _KEEP_OUTPUTS:
        found.append(node.name)
    if node.op in _KEEP_OTHERS:
        theirs = bool(graph.read_by(node))
        found += [name for name in reads if theirs or any(other in trained for other in reads if other != name)] or (
            [reads[0]] if len(reads) == 1 and theirs else []
        )
    return list(dict.fromkeys(graph.base.get(name, name) for name in found))


def blocks_of(graph: LayerGraph, nodes: Sequence[Node], start: str) -> list[Block]:
    """Blocks of a layer. nodes: in order. start: the value that the layer gets from the one before."""
    layer = layer_of(nodes[0].module)
    # Parameters of other modules that the layer reads, as position biases, are outside of it.
    counted = {each.identity for node in nodes for each in graph.read_by(node) if layer_of(each.name) != layer}
    divided = _divided(graph, nodes, start)
    parts = [_Costs(graph, *part) for part in divided]
    ends = [at for at, part in enumerate(parts, start=1) if part.is_sharded]
    if not ends:
        parts = [_Costs(graph, *part, sums=True) for part in divided]
        ends = list(range(1, len(parts) + 1))
    blocks = [part.block(counted) for part in parts]
    return [
        _joined(f"block {number}", blocks[first:end], blocks[end:] if end == ends[-1] else [])
        for number, (first, end) in enumerate(pairwise([0, *ends]))
    ]


def _joined(name: str, blocks: Sequence[Block], behind: Sequence[Block]) -> Block:
    """One block of several up to its sum, which is the last one's, and of those behind that have no sum either."""
    *before, last = blocks
    shares: dict[Key, list[Share]] = {}
    for each in (*before, last, *behind):
        moved = 0 if each is last else each.combined
        for share in (*each.shares, Share(moved=moved)) if moved else each.shares:
            shares.setdefault((share.units, share.optional), []).append(share)
    made = (
        Share(units, optional, **{name: sum(getattr(share, name) for share in found) for name in _NUMBERS})
        for (units, optional), found in sorted(shares.items())
    )
    return Block(name, tuple(made), last.combined, sum(each.ops for each in (*before, last, *behind)))


def is_token_wise(graph: LayerGraph, nodes: Sequence[Node], start: str) -> bool:
    """Whether a layer relates tokens between its column- and row-parallel matmuls alone; arguments of `blocks_of`."""
    return all(_Costs(graph, *part).token_wise for part in _divided(graph, nodes, start))


def _divided(graph: LayerGraph, nodes: Sequence[Node], start: str) -> list[tuple[list[Node], str]]:
    """Nodes of each block, with the activation that it gets."""
    stream, worked, entry = {start}, set[str](), start
    parts: list[tuple[list[Node], str]] = []
    current: list[Node] = []
    size = prod(graph.shape(start))
    for node in nodes:
        current.append(node)
        from_work = not worked.isdisjoint(node.inputs)
        from_stream = not stream.isdisjoint(node.inputs)
        if from_work and from_stream and node.op in _ADDS and prod(node.shapes[0]) == size:
            parts.append((current, entry))
            current, stream, worked, entry = [], {node.name}, set(), node.name
        elif from_work or graph.matrices(node):
            worked.add(node.name)
        elif from_stream:
            stream.add(node.name)
    if current and parts and not any(graph.matrices(node) for node in current):
        parts[-1][0].extend(current)
    elif current:
        parts.append((current, entry))
    return parts


class _Costs:
    """Costs of one block's nodes. sums: norms over sharded features are summed over the ranks (BitNet)."""

    def __init__(self, graph: LayerGraph, nodes: Sequence[Node], entry: str, *, sums: bool = False) -> None:
        self.graph = graph
        self.nodes = nodes
        self.entry = entry
        self.matmuls = {node.name: node for node in nodes if graph.matrices(node)}
        self._above = self._nearest(nodes, {node.name: node.inputs for node in nodes})
        users: dict[str, list[str]] = {}
        for node in nodes:
            for name in node.inputs:
                users.setdefault(name, []).append(node.name)
        self._below = self._nearest(list(reversed(nodes)), {node.name: users.get(node.name, ()) for node in nodes})
        self.rows = {n for n in self.matmuls if not self._below[n] and self._above[n]}
        self.columns = {n for n in self.matmuls if n not in self.rows and self._below[n] & self.rows}
        self._keys = {name: self._key_of_row(name) for name in self.rows}
        self._keys |= {name: self._key_of_column(name) for name in self.columns}
        self._normed = {row for node in nodes for row in self._normed_by(node)}
        """Rows of which a norm before them reads all features, so that every rank computes them whole."""
        if not sums:
            whole = self._normed | {name for name in self.columns if self._below[name] & self._normed}
            self._keys |= dict.fromkeys(whole, _WHOLE)

    def _nearest(self, nodes: Iterable[Node], links: dict[str, Sequence[str]]) -> dict[str, set[str]]:
        """Matmuls that each node is linked to through trained values and no other matmul."""
        found: dict[str, set[str]] = {}
        for node in nodes:
            mine = found.setdefault(node.name, set())
            for other in links[node.name]:
                if other not in self.graph.trained:
                    continue
                mine |= {other} if other in self.matmuls else found.get(other, set())
        return found

    def _normed_by(self, node: Node) -> set[str]:
        """Rows of which a node reads all features of a column-parallel matmul at once."""
        rows = self._below[node.name] & self.rows if node.op in _OVER_FEATURES and node.inputs else set()
        over = self.graph.shape(node.inputs[0])[-1] if rows else 0
        above = self._above[node.name] & self.columns if rows else set()
        return rows if any(self.matmuls[name].shapes[0][-1] == over for name in above) else set()

    def _attention(self, row: str) -> Node | None:
        return next(
            (n for n in self.nodes if n.op in _ATTENTION and len(n.shapes[0]) == 4 and row in self._below[n.name]),
            None,
        )

    def _inputs_of(self, name: str) -> int:
        """Input features of a matmul."""
        node = self.matmuls[name]
        value = next(each for each in node.inputs if each not in self.graph.weights)
        return self.graph.shape(value)[-1]

    def _experts(self, name: str) -> int:
        """Experts of a grouped matmul; 0 for another."""
        return next((m.shape[0] for m in self.graph.matrices(self.matmuls[name]) if len(m.shape) == 3), 0)

    def _key_of_row(self, name: str) -> Key:
        if experts := self._experts(name):
            return experts, True
        attention = self._attention(name)
        return (attention.shapes[0][1] if attention is not None else self._inputs_of(name)), False

    def _key_of_column(self, name: str) -> Key:
        if experts := self._experts(name):
            return experts, True
        row = next(iter(sorted(self._below[name] & self.rows)))
        attention = self._attention(row)
        if attention is None:
            return self._keys[row]
        features, heads = self.matmuls[name].shapes[0][-1], attention.shapes[0][1]
        value_size = self._inputs_of(row) // heads
        dot = attention.op == "aten.scaled_dot_product_attention"
        size = self.graph.shape(attention.inputs[0])[-1] if dot else value_size
        if features % size == 0 and (size == value_size or features == heads * size):
            number = features // size
            if number < heads:
                return number, True
            return (number if number == heads else max(1, (number - heads) // 2)), False
        return (heads, False) if features % heads == 0 else _WHOLE

    def _key(self, node: Node) -> Key | None:
        """Sharding of a node; None for what is computed with the sum."""
        name = node.name
        if name in self.matmuls:
            return self._keys.get(name, _WHOLE)
        above, rows = self._above[name] & self.columns, self._below[name] & self.rows
        if above and rows:
            keys = {self._keys[each] for each in above}
            return next(iter(keys)) if len(keys) == 1 else self._keys[sorted(rows)[0]]
        return None if self._above[name] & self.rows and not self._below[name] else _WHOLE

    @property
    def token_wise(self) -> bool:
        """Whether attention is sharded, so that the rest of the block can run on parts of the sequence.

        It is not where a norm reads all features of a column-parallel matmul at once, which then stays whole.
        """
        attention = (node for node in self.nodes if node.op in _ATTENTION and len(node.shapes[0]) == 4)
        whole = any((self._key(node) or _WHOLE)[0] == 1 for node in attention)
        return bool(self.rows) and not (whole or self._normed)

    @property
    def is_sharded(self) -> bool:
        """Whether a matmul of it is row-parallel, whose results are summed over the ranks."""
        return bool(self.rows - self._normed)

    def _routed(self) -> dict[Key, Counter[str]]:
        """Bytes of the tokens that experts get, by their share; gate and up read the same ones."""
        found: dict[Key, Counter[str]] = {}
        for name in sorted(self.columns):
            if experts := self._experts(name):
                read = next(each for each in self.matmuls[name].inputs if each not in self.graph.weights)
                found[experts, True] = Counter(routed=self.graph.value_bytes[read])
        return found

    def block(self, counted: set[int]) -> Block:
        """The block with its costs, without a name.

        counted: identities of parameters that count elsewhere; the block's are added.
        """
        shares = defaultdict(Counter[str], {_WHOLE: Counter[str](), **self._routed()})
        combined = ops = 0

        known = {node.name: self._key(node) for node in self.nodes}
        kept = {self.entry}
        for node in self.nodes:
            key, flops = known[node.name], node.flops
            ops += bool(node.bytes_out and node.name not in self.graph.weights)
            if key is None:
                combined += self.graph.moved(node)
            else:
                shares[key]["moved"] += self.graph.moved(node)
            if flops:
                what = "row" if node.name in self.rows else "column" if node.name in self.matmuls else "core"
                shares[key or _WHOLE][what] += flops
            for each in self.graph.read_by(node) if node.name not in self.graph.weights else ():
                if each.identity not in counted:
                    counted.add(each.identity)
                    cut = node.name in self.columns or (node.name in self.rows and len(each.shape) >= 2)
                    shares[(key or _WHOLE) if cut else _WHOLE]["parameters"] += each.size
            kept.update(_kept(self.graph, node))
            if node.op in _MASKED and node.name in self.graph.trained:
                shares[key or _WHOLE]["kept"] += prod(node.shapes[0])
        for value in kept:
            if value == self.entry or value in known:
                shares[known.get(value) or _WHOLE]["kept"] += self.graph.value_bytes[value]
        made = (
            Share(units, optional, **numbers)
            for (units, optional), numbers in sorted(shares.items())
            if any(numbers.values())
        )
        return Block("", tuple(made), combined, max(1, ops))


def trace_layers(
    model: nn.Module, *, inputs: Inputs | None = None, sequence: int | None = None, on_layer: Progress | None = None
) -> Model:
    """Costs of a model's layers for the planner, of one sample; layers of one kind are traced once.

    inputs, sequence: as in `trace`, with a batch of one. on_layer(done, total): progress callback. Raises UsageError
    as `trace` and `layered_model` do.
    """
    with layers_once(model, on_layer) as alike:
        graph = trace(model, inputs=inputs, sequence=sequence)
    return layered_model(graph, alike)


def trace_configuration(
    given: Any, *, sequence: int | None = None, dtype: str = "float32", on_layer: Progress | None = None
) -> Model:
    """Costs of the layers of a model given by its configuration; no weights are read or made.

    given: path of a config.json of transformers or of a folder with one, or a transformers configuration. Raises
    UsageError for one that is not valid or that transformers does not know.
    """
    if hasattr(given, "to_dict"):
        data = given.to_dict()
    else:
        data = read_configuration(Path(given), "model", "a config.json of transformers")
    return trace_layers(configured_model(data, dtype), sequence=sequence, on_layer=on_layer)


def layered_model(graph: LayerGraph, alike: Mapping[str, str] | None = None) -> Model:
    """Costs of a graph's layers. alike: layers that were not traced, each with a traced one of equal costs.

    Exact: parameters, FLOPs of matmuls and attention, bytes of activations between layers. By rule: which activations
    the backward pass keeps (those that torch's formulas read), and what is sharded (see above).
    Raises UsageError for a model without lists of layers, and for layers that hand on activations of different sizes.
    """
    alike = alike or {}
    nodes: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if layer := layer_of(node.module):
            nodes.setdefault(layer, []).append(node)
    paths = [path for path in nodes if path in alike or any(graph.matrices(node) for node in nodes[path])]
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
            blocks = tuple(blocks_of(graph, nodes[of], start))
            units[of] = graph.shape(start)
            token_wise = token_wise and len(units[of]) == 3 and is_token_wise(graph, nodes[of], start)
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
        outside=_outside(graph, set(paths), firsts, vocabulary),
        messages=_messages(graph, *([nodes[each] for each in names] for names in (paths, of_paths))),
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
    graph: LayerGraph, layers: Sequence[Sequence[Node]], traced: Sequence[Sequence[Node]]
) -> tuple[int, ...]:
    """Bytes of values with gradients that cross the border before each layer, views once.

    traced: the nodes that stand for each layer, whose reads of values from elsewhere count as the layer's own.
    """
    last: dict[str, int] = {}
    for name, use in last_uses(graph).items():
        base = graph.base.get(name, name)
        last[base] = max(last.get(base, 0), use)
    for own, nodes in zip(layers, traced, strict=True):
        if own is not nodes:
            entry, first = _entry(graph, nodes), graph.place[own[0].name]
            made = {node.name for node in nodes}
            for name in {name for node in nodes for name in node.inputs} - made - {entry}:
                base = graph.base.get(name, name)
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
    return node.is_lookup and any(not graph.table[name].buffer for name in node.parameters)


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


def _outside(graph: LayerGraph, layers: set[str], firsts: Sequence[int], vocabulary: int) -> tuple[Outside, ...]:
    """Work before each layer and after the last one. Parameters that nothing reads come first."""
    parts: dict[int, list[Node]] = {0: []}
    last = max(graph.place[node.name] for node in graph.nodes if layer_of(node.module) in layers)
    for node in graph.nodes:
        if layer_of(node.module) not in layers:
            at = graph.place[node.name]
            parts.setdefault(len(firsts) if at > last else sum(first < at for first in firsts), []).append(node)
    read = {p.identity for nodes in parts.values() for node in nodes for p in graph.read_by(node)}
    read |= {p.identity for p in graph.parameters if layer_of(p.name) in layers}
    unread = {p.identity: p.size for p in graph.parameters if not p.buffer and p.identity not in read}
    tables: set[int] = set()
    found = []
    for before, nodes in sorted(parts.items()):
        whole, cut, logits, tied = Counter[str](), Counter[str](), 0, 0
        counted: set[int] = set()
        whole["parameters"] += 0 if before else sum(unread.values())
        for node in nodes:
            flops = node.flops
            mine = [each for each in graph.read_by(node) if each.identity not in counted]
            counted |= {each.identity for each in mine}
            rows = [each for each in graph.read_by(node) if vocabulary and each.shape[0] == vocabulary]
            to = cut if rows and (flops or is_embedding(graph, node)) else whole
            to["column"] += flops
            to["moved"] += graph.moved(node)
            if flops:
                logits = max(logits, prod(node.shapes[0]))
            for each in mine:
                if to is cut and each in rows:
                    cut["parameters"] += each.size
                    tied += each.size if each.identity in tables else 0
                    tables.add(each.identity)
                else:
                    whole["parameters"] += each.size
        shares = ((1, whole), (max(1, vocabulary), cut))
        made = tuple(Share(units, units > 1, **numbers) for units, numbers in shares if any(numbers.values()))
        if made:
            found.append(Outside(before, made, logits, tied))
    return tuple(found)


def _unfit(graph: LayerGraph, why: str) -> UsageError:
    return UsageError(f"{graph.name} cannot be planned: {why}; give the sizes of a GPT like it")
