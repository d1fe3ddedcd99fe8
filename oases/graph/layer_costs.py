"""Blocks of one layer of a graph, with their costs and how each part is sharded, for the planner.

A block ends where a result is added to the activation between layers: there its row-parallel matmuls are summed over
the ranks. In a block a matmul that no other follows is row-parallel, those that feed it directly are column-parallel
(Megatron's pairs, arXiv 1909.08053), and what lies between them is sharded alike. All else is computed by every rank:
also a pair with a norm over all of its features in between (OLMo). What has no sum is part of the block behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import prod

from oases.graph.layer_graph import LayerGraph, Node, Parameter, layer_of
from oases.plans.layered import Block, Share

_ADDS = ("aten.add", "aten.add_")
_ATTENTION = ("aten.scaled_dot_product_attention", "aten.softmax", "aten._softmax")
_GROUPED = ("grouped_mm", "grouped_mm_fallback")
"""Matmuls of experts, whose FLOPs torch does not count."""
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


def flops_of(node: Node, graph: LayerGraph) -> int:
    """FLOPs of a node's forward pass, matmuls of experts included."""
    if node.flops and not node.op.endswith(_GROUPED):
        return node.flops
    if node.op.endswith(_GROUPED) and node.inputs and node.shapes:
        rows = graph.nodes[graph.place[node.inputs[0]]].shapes[0]
        return 2 * prod(rows) * node.shapes[0][-1]
    return 0


@dataclass
class Reading:
    """View of a graph for the costs of layers: views resolved, and the matrices that each node multiplies by."""

    graph: LayerGraph
    base: dict[str, str] = field(default_factory=dict)
    weights: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if node.parameters and not node.inputs and not self.is_lookup(node):
                self.weights[node.name] = node.parameters  # a weight, transposed or cast
            elif node.inputs and all(name in self.weights for name in node.inputs):
                self.weights[node.name] = tuple(p for name in node.inputs for p in self.weights[name])
            whole = bool(node.inputs) and not node.bytes_out
            self.base[node.name] = self.base.get(node.inputs[0], node.inputs[0]) if whole else node.name

    @staticmethod
    def is_lookup(node: Node) -> bool:
        """Whether a node looks rows up in a table."""
        return node.op in ("aten.embedding", "aten.embedding_bag")

    def parameters(self, node: Node) -> list[Parameter]:
        """Parameters that a node reads, directly or transposed, each once, without buffers."""
        names = [*node.parameters, *(p for name in node.inputs for p in self.weights.get(name, ()))]
        found = {self.graph.table[name].identity: self.graph.table[name] for name in names}
        return [each for each in found.values() if not each.buffer]

    def matrices(self, node: Node) -> list[Parameter]:
        """Matrices that a node multiplies by."""
        return [each for each in self.parameters(node) if len(each.shape) >= 2] if flops_of(node, self.graph) else []

    def moved(self, node: Node) -> int:
        """Bytes that a node other than a matmul reads and writes; 0 for a view."""
        if not node.bytes_out or flops_of(node, self.graph) or node.name in self.weights:
            return 0
        return node.bytes_out + sum(min(self.graph.value_bytes[name], 8 * node.bytes_out) for name in node.inputs)

    def kept(self, node: Node) -> list[str]:
        """Values (as bases) that the node's backward pass reads."""
        trained = self.graph.trained
        if node.name not in trained:
            return []
        found: list[str] = []
        reads = [name for name in node.inputs if name not in self.weights]
        if node.op in _KEEP_INPUTS or flops_of(node, self.graph):
            found += reads
        if node.op in _KEEP_OUTPUTS:
            found.append(node.name)
        if node.op in _KEEP_OTHERS:
            theirs = bool(self.parameters(node))
            found += [
                name for name in reads if theirs or any(other in trained for other in reads if other != name)
            ] or ([reads[0]] if len(reads) == 1 and theirs else [])
        return list(dict.fromkeys(self.base.get(name, name) for name in found))


def blocks_of(reading: Reading, nodes: Sequence[Node], start: str) -> list[Block]:
    """Blocks of a layer. nodes: in order. start: the value that the layer gets from the one before."""
    layer = layer_of(nodes[0].module)
    # Parameters of other modules that the layer reads, as position biases, are outside of it.
    counted = {each.identity for node in nodes for each in reading.parameters(node) if layer_of(each.name) != layer}
    divided = _divided(reading, nodes, start)
    parts = [_Costs(reading, *part) for part in divided]
    ends = [at for at, part in enumerate(parts, start=1) if part.is_sharded]
    if not ends:
        parts = [_Costs(reading, *part, sums=True) for part in divided]
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


def is_token_wise(reading: Reading, nodes: Sequence[Node], start: str) -> bool:
    """Whether a layer relates tokens between its column- and row-parallel matmuls alone; arguments of `blocks_of`."""
    return all(_Costs(reading, *part).token_wise for part in _divided(reading, nodes, start))


def _divided(reading: Reading, nodes: Sequence[Node], start: str) -> list[tuple[list[Node], str]]:
    """Nodes of each block, with the activation that it gets."""
    graph = reading.graph
    stream, worked, entry = {start}, set[str](), start
    parts: list[tuple[list[Node], str]] = []
    current: list[Node] = []
    size = prod(graph.nodes[graph.place[start]].shapes[0]) if start in graph.place else 0
    for node in nodes:
        current.append(node)
        from_work = not worked.isdisjoint(node.inputs)
        from_stream = not stream.isdisjoint(node.inputs)
        if from_work and from_stream and node.op in _ADDS and prod(node.shapes[0]) == size:
            parts.append((current, entry))
            current, stream, worked, entry = [], {node.name}, set(), node.name
        elif from_work or reading.matrices(node):
            worked.add(node.name)
        elif from_stream:
            stream.add(node.name)
    if current and parts and not any(reading.matrices(node) for node in current):
        parts[-1][0].extend(current)
    elif current:
        parts.append((current, entry))
    return parts


class _Costs:
    """Costs of one block's nodes. sums: norms over sharded features are summed over the ranks (BitNet)."""

    def __init__(self, reading: Reading, nodes: Sequence[Node], entry: str, *, sums: bool = False) -> None:
        self.reading = reading
        self.graph = reading.graph
        self.nodes = nodes
        self.entry = entry
        self.matmuls = {node.name: node for node in nodes if reading.matrices(node)}
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
        over = self._shape(node.inputs[0])[-1] if rows else 0
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
        value = next(each for each in node.inputs if each not in self.reading.weights)
        return self._shape(value)[-1]

    def _shape(self, value: str) -> tuple[int, ...]:
        place = self.graph.place.get(value)
        if place is not None:
            return self.graph.nodes[place].shapes[0]
        return next(each.shape for each in self.graph.inputs if each.name == value)

    def _experts(self, name: str) -> int:
        """Experts of a grouped matmul; 0 for another."""
        return next((m.shape[0] for m in self.reading.matrices(self.matmuls[name]) if len(m.shape) == 3), 0)

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
        size = self._shape(attention.inputs[0])[-1] if dot else value_size
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

    def _routed(self) -> dict[Key, dict[str, int]]:
        """Bytes of the tokens that experts get, by their share; gate and up read the same ones."""
        found: dict[Key, dict[str, int]] = {}
        for name in sorted(self.columns):
            if experts := self._experts(name):
                read = next(each for each in self.matmuls[name].inputs if each not in self.reading.weights)
                found[experts, True] = {"routed": self._bytes(read)}
        return found

    def block(self, counted: set[int]) -> Block:
        """The block with its costs, without a name.

        counted: identities of parameters that count elsewhere; the block's are added.
        """
        shares = {_WHOLE: dict[str, int](), **self._routed()}
        combined = ops = 0

        def add(key: Key, what: str, number: int) -> None:
            share = shares.setdefault(key, {})
            share[what] = share.get(what, 0) + number

        known = {node.name: self._key(node) for node in self.nodes}
        kept = {self.entry}
        for node in self.nodes:
            key, flops = known[node.name], flops_of(node, self.graph)
            ops += bool(node.bytes_out and node.name not in self.reading.weights)
            if key is None:
                combined += self.reading.moved(node)
            else:
                add(key, "moved", self.reading.moved(node))
            if flops:
                what = "row" if node.name in self.rows else "column" if node.name in self.matmuls else "core"
                add(key or _WHOLE, what, flops)
            for each in self.reading.parameters(node) if node.name not in self.reading.weights else ():
                if each.identity not in counted:
                    counted.add(each.identity)
                    cut = node.name in self.columns or (node.name in self.rows and len(each.shape) >= 2)
                    add((key or _WHOLE) if cut else _WHOLE, "parameters", each.size)
            kept.update(self.reading.kept(node))
            if node.op in _MASKED and node.name in self.graph.trained:
                add(key or _WHOLE, "kept", prod(node.shapes[0]))
        for value in kept:
            if value == self.entry or value in known:
                add(known.get(value) or _WHOLE, "kept", self._bytes(value))
        made = (
            Share(units, optional, **numbers)
            for (units, optional), numbers in sorted(shares.items())
            if any(numbers.values())
        )
        return Block("", tuple(made), combined, max(1, ops))

    def _bytes(self, value: str) -> int:
        return self.graph.value_bytes[value]
