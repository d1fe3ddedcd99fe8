"""The sequence dimension in a rank's graph, and the batch's in a layer's: tracked by the op table, and cut.

What runs on a part of the sequence must treat tokens independently: ops that relate tokens are refused, and so is one
that reads another tensor along the sequence, unless that is an input that is cut as the activation is. In a sub-batch
of tokens, causal attention may read the keys of earlier ones.

Under sequence parallelism a block becomes three graphs: `prepare` (its norm) and `combine` (bias, dropout, residual)
run on a rank's part, `product` on the gathered sequence. For sub-batches of tokens it becomes two: `combine`, and
`partial`, which runs on the part if it can and else on all tokens. One that sends tokens to experts becomes three.

Sub-batches of samples cut dimension 0 of the activation, in which a layer must treat them independently. Where that
is the sequence instead (activations of [sequence, batch, ...]), attention relates its elements. Its length is a
symbol in a traced graph, so ops that run along it are found by their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from oases.autotp.balanced import balanced_experts
from oases.autotp.cutting import BlockPieces, Piece, ancestors, is_random, piece_between
from oases.autotp.export import UnsplittableError, shape_of
from oases.autotp.lowering import block_dropout, block_linear
from oases.autotp.op_table import (
    VIEWS,
    args_of,
    argument,
    dims_of,
    expression,
    follow,
    is_element_wise,
    lengths_in,
    name_of,
    value_in,
)  # fmt: skip
from oases.autotp.shapes import Split, viewed
from oases.autotp.splitter import enter
from oases.layers.attention import causal_attention


def is_attention(node: fx.Node) -> bool:
    """Whether a node is torch's attention."""
    return name_of(node) == "scaled_dot_product_attention"


def cuts_of_mask(node: fx.Node) -> list[fx.Node]:
    """Cuts of an attention's mask to the number of its keys, which it has already where it is square."""
    found: list[fx.Node] = []
    mask = argument(node, 3)
    while isinstance(mask, fx.Node) and (mask.target is enter or name_of(mask) == "slice"):
        source, dim, begin, *_ = (*mask.args, -1, 0)
        last = len(lengths_in(source)) - 1
        if begin not in (0, None) or dim not in (-1, last):
            break
        found.append(mask)
        mask = source
    return found


def mask_of(node: fx.Node) -> fx.Node | None:
    """Mask of an attention before such cuts."""
    cuts = cuts_of_mask(node)
    mask: fx.Node | None = args_of(cuts[-1])[0] if cuts else argument(node, 3)
    return mask


class Tokens:
    """Follows the dimension of the tokens through a rank's graph. length: their number, an expression."""

    def __init__(self, graph: fx.Graph, x: fx.Node) -> None:
        lengths = lengths_in(x)
        if len(lengths) < 3:
            raise UnsplittableError(f"its activation has {len(lengths)} dimensions; [batch, sequence, ...] is needed")
        if isinstance(lengths[1], int) or lengths[0] == lengths[1]:
            raise UnsplittableError("its graph is valid for one length of the sequence alone")
        self.graph, self.x = graph, x
        self.batch, self.length = lengths[:2]
        self.of_activation = Split(1, (shape_of(x.meta["like"])[1],))

    def of_sums(self, sums: list[fx.Node]) -> Split:
        """Where a block's sums have the tokens: as the activation, or in dimension 0, with the batch."""
        both = self.batch * self.length  # batch and sequence in one
        flat = [bool(not isinstance(lengths_in(node)[0], int) and (lengths_in(node)[0] - both).expand() == 0)
                for node in sums]  # fmt: skip
        for node, its in zip(sums, flat, strict=True):
            if its != flat[0] or not (its or lengths_in(node)[:2] == lengths_in(self.x)[:2]):
                raise UnsplittableError(f"its sum {node} is not of [batch, sequence, ...]")
        batch, segments = shape_of(self.x.meta["like"])[0], self.of_activation.segments
        return Split(0, segments * batch) if flat[0] else self.of_activation

    def inputs(self) -> dict[fx.Node, Split]:
        """Where inputs besides the activation have the tokens; without those that have them in several dimensions."""
        found = {}
        for node in self.graph.nodes:
            if node.op != "placeholder" or node is self.x:
                continue
            dims = [dim for dim, length in enumerate(lengths_in(node)) if length == self.length]
            if len(dims) == 1:
                found[node] = Split(dims[0], self.of_activation.segments)
        return found

    def followed(
        self, needed: set[fx.Node], given: Mapping[fx.Node, Split], causal: bool = False
    ) -> dict[fx.Node, Any]:
        """Where each node has the tokens: a Split, a list of them for several results, None for nowhere.

        causal: follow attention to earlier tokens. Raises UnsplittableError for other ops that relate tokens.
        """
        found: dict[fx.Node, Any] = dict(given)
        for node in self.graph.nodes:
            if node in needed and node not in found:
                if node.op == "placeholder":
                    found[node] = None
                elif causal and is_attention(node):
                    found[node] = self._attention(node, found)
                else:
                    found[node] = self._followed(node, found)
        return found

    def _attention(self, node: fx.Node, found: Mapping[fx.Node, Any]) -> Split:
        """Split of an attention whose queries, keys and values have the tokens in the same place."""
        splits = {found.get(each) for each in node.args[:3]}  # type: ignore[arg-type]
        (split, *others), mask = splits, mask_of(node)
        if others or not isinstance(split, Split) or split.dim != len(lengths_in(node)) - 2:
            raise self._refused(node, "relates tokens")
        if is_random(node) or (mask is None and not argument(node, 5)):
            raise self._refused(node, "relates a token to later ones, or draws random numbers")
        if mask is not None and (mask.op != "placeholder" or found.get(mask) is not None):
            raise self._refused(node, "reads a mask that is no input of the layer")
        return split

    def _followed(self, node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
        value = value_in(node)
        if isinstance(value, (torch.SymInt, int)):
            return None  # a length: of this rank's part where it is read from the activation
        inside = {each: found[each] for each in node.all_input_nodes if found.get(each) is not None}
        name, lengths = name_of(node), [each for each in node.all_input_nodes if self._counts_tokens(each)]
        if inside and name == "getitem":
            source, place = args_of(node)
            several = inside[source]
            return several[place] if isinstance(several, list) else several
        if inside and name in (*VIEWS, "expand"):
            return self._viewed(node, inside)
        if lengths:
            raise self._refused(node, "reads the length of the sequence")
        return self._of_op(node, inside) if inside else None

    def _of_op(self, node: fx.Node, inside: Mapping[fx.Node, Split]) -> Split | list[Split]:
        """Split of each result of an op on tokens."""
        if node.target is block_dropout:
            if inside[args_of(node)[0]].dim != 1 or lengths_in(node)[0] != self.batch:
                raise self._refused(node, "draws a mask of another shape than [batch, sequence, ...]")
        elif is_random(node):
            raise self._refused(node, "draws random numbers")
        path = follow(node, inside)
        if path.why:
            texts = {"unknown": "may relate tokens", "combines": "combines tokens with others"}
            raise self._refused(node, texts.get(path.why, f"{path.why} the sequence"))
        for each, at in path.beside.items():
            if at is not None:
                raise self._refused(node, f"reads {each} along the sequence")
        return path.results[0] if isinstance(value_in(node), Tensor) else list(path.results)

    def _viewed(self, node: fx.Node, inside: Mapping[fx.Node, Split]) -> Split:
        (x, split), *_ = inside.items()
        before, after = shape_of(x.meta["like"]), shape_of(node.meta["like"])
        name = name_of(node)
        expanded = split.dim + len(after) - len(before), split.segments
        moved = expanded if name == "expand" else viewed(before, after, split.dim, split.segments)
        if moved is None:
            raise self._refused(node, "mixes the sequence with another dimension")
        sizes = node.args[1] if name in ("view", "reshape", "_unsafe_view", "expand") else ()
        for place, size in enumerate(sizes):  # type: ignore[arg-type]
            along = place == moved[0]
            if isinstance(size, fx.Node):
                kept = self._multiplies_tokens(size) if along else not self._counts_tokens(size)
            else:
                kept = not along or size == -1
            if not kept:
                raise self._refused(node, "has a fixed length of the sequence")
        if name == "unflatten":
            raise self._refused(node, "takes a dimension apart")
        return Split(*moved)

    def _counts_tokens(self, node: fx.Node) -> bool:
        """Whether a node is a number that depends on the number of tokens."""
        value = value_in(node)
        return isinstance(value, torch.SymInt) and self.length in value.node.expr.free_symbols

    def _multiplies_tokens(self, node: fx.Node) -> bool:
        """Whether a node is the number of tokens times something else."""
        if not self._counts_tokens(node):
            return False
        found = value_in(node).node.expr
        return bool((found.subs(self.length, 2 * self.length) - 2 * found).expand() == 0)

    @staticmethod
    def _refused(node: fx.Node, why: str) -> UnsplittableError:
        like = node.meta.get("like", node)
        modules = [kind for _, kind in like.meta.get("nn_module_stack", {}).values()]
        where = f" of {str(modules[-1]).rpartition('.')[2]}" if modules else ""
        return UnsplittableError(f"{like} ({node.target}){where} {why}, and it is replicated")


@dataclass(frozen=True)
class TokenPieces:
    """Graphs of a block under sequence parallelism."""

    prepare: Piece
    product: Piece
    combine: Piece


@dataclass(frozen=True)
class SubBatchPieces:
    """Graphs of a block for sub-batches of tokens, whose sums are [batch, sequence, ...].

    relates: the tokens that each token is related to by `partial`, which must get all of them for "all". masks:
    inputs (placeholders) that must be causal masks for "earlier". dims: by input that they read a part of, the
    dimension of its tokens.
    """

    partial: Piece
    combine: Piece
    relates: Literal["none", "earlier", "all"]
    masks: frozenset[str]
    dims: Mapping[str, int]


def token_pieces(graph: fx.Graph, x: fx.Node, block: BlockPieces) -> TokenPieces:
    """Cut one block of a rank's graph. x: the layer's activation.

    Raises UnsplittableError where what follows the sums relates tokens.
    """
    tokens = Tokens(graph, x)
    combine = _combine(tokens, block, {})
    border = _border(tokens, block)
    product = _summed(tokens, block, piece_between(graph, x, [border], block.targets))
    return TokenPieces(piece_between(graph, x, [block.begin], [border], tokens.length), product, combine)


def sub_batch_pieces(graph: fx.Graph, x: fx.Node, block: BlockPieces) -> SubBatchPieces:
    """The same for sub-batches of tokens."""
    tokens, begin, targets = Tokens(graph, x), block.begin, block.targets
    masks = {node: mask_of(node) for node in ancestors(targets, {begin}) if is_attention(node)}
    inputs = {node: split for node, split in tokens.inputs().items() if node not in masks.values()}
    combine = _combine(tokens, block, inputs)
    relates: Literal["none", "earlier", "all"] = "all"
    try:
        needed = ancestors(targets, {begin, *(each for node in masks for each in cuts_of_mask(node))})
        found = tokens.followed(needed, {begin: tokens.of_activation, **inputs}, causal=True)
        if all(found.get(node) == tokens.of_sums(block.sums) for node in targets):
            relates = "earlier" if masks else "none"
    except UnsplittableError:
        pass  # it runs on all tokens
    length, calls = (None, {}) if relates == "all" else (tokens.length, {
        node: (causal_attention, (*node.args[:3], mask, *node.args[4:])) for node, mask in masks.items()
    })  # fmt: skip
    partial = _summed(tokens, block, piece_between(graph, x, [begin], targets, length, calls))
    reads = {*combine.reads, *(() if relates == "all" else partial.reads)}
    dims = {str(node.target): split.dim for node, split in inputs.items() if node.target in reads}
    names = frozenset(str(mask.target) for mask in masks.values() if relates == "earlier" and mask is not None)
    return SubBatchPieces(partial, combine, relates, names, dims)


def _combine(tokens: Tokens, block: BlockPieces, inputs: Mapping[fx.Node, Split]) -> Piece:
    """The graph after the sums, of a part of the sequence. inputs: of which it reads the part, too."""
    along, of_sums = tokens.of_activation, tokens.of_sums(block.sums)
    begin, sums, end = block.begin, block.sums, block.end
    given = {begin: along, **dict.fromkeys(sums, of_sums), **inputs}
    found = tokens.followed(ancestors([end], {begin, *sums}), given)
    if end not in (begin, *sums) and found[end] != along:
        raise UnsplittableError(f"its result {end} does not have the sequence as dimension 1")
    combine = piece_between(tokens.graph, tokens.x, [begin, *sums], [end], tokens.length)
    run = combine.run
    return combine if of_sums == along else Piece(lambda x, y, *read: run(x, y.flatten(0, 1), *read), combine.reads)


def _summed(tokens: Tokens, block: BlockPieces, product: Piece) -> Piece:
    """A product whose sum is [batch, sequence, ...], to be scattered, also where it is [batch * sequence, ...]."""
    run = product.run
    if tokens.of_sums(block.sums) == tokens.of_activation:
        return product
    return Piece(lambda h, *read: run(h, *read).unflatten(0, h.shape[:2]), product.reads)


def _border(tokens: Tokens, block: BlockPieces) -> fx.Node:
    """Last node that is computed token by token from `begin` and that the targets depend on alone; else `begin`."""
    begin, targets, along = block.begin, block.targets, tokens.of_activation
    needed = ancestors(targets, {begin})
    for node in reversed([each for each in tokens.graph.nodes if each in needed]):
        if lengths_in(node) != lengths_in(tokens.x) or begin in ancestors(targets, {node}):
            continue
        before = ancestors([node], {begin})
        if any(is_random(each) or each.target is block_linear for each in before):
            continue
        try:
            if tokens.followed(before, {begin: along})[node] == along:
                return node
        except UnsplittableError:
            continue
    return begin


@dataclass(frozen=True)
class ExpertPieces:
    """The graphs of a block in three pieces.

    before: the block's input -> tokens, their experts and weights. given: any tensor -> the state of the experts and
    their weights on this rank. after: the block's input and the experts' result -> partial sum.
    """

    before: Piece
    given: Piece
    after: Piece


def expert_pieces(graph: fx.Graph, x: fx.Node, block: BlockPieces) -> ExpertPieces | None:
    """Pieces of a block; None unless it sends tokens to experts once."""
    begin, targets = block.begin, block.targets
    found = [node for node in ancestors(targets, {begin}) if node.target is balanced_experts]
    if len(found) != 1:
        return None
    (node,) = found
    state, *tokens = node.args[:4]
    own = [state, *node.args[4:]]
    if begin in ancestors(own, set()):
        return None
    return ExpertPieces(
        piece_between(graph, x, [begin], tokens, apart=True),
        piece_between(graph, x, [begin], own, apart=True),
        piece_between(graph, x, [begin, node], targets),
    )


def relation_of_samples(graph: fx.Graph, activation: str, result: Any) -> str:
    """Op by which elements along dimension 0 of the activation depend on each other, or "".

    graph: of the unsharded layer. activation: the placeholder. result: the node of the layer's first result.
    """
    (x,) = graph.find_nodes(op="placeholder", target=activation)
    symbols = _symbols(lengths_in(x)[0])
    needed = ancestors([result], set()) if symbols else set[fx.Node]()
    for node in (each for each in graph.nodes if each in needed and each.op == "call_function"):
        if any(_symbols(each) & symbols for each in _lengths_related(node)) or _divides(node, symbols):
            return f"{node} ({node.target}) relates elements along dimension 0 of its activation"
    return ""


def _symbols(length: Any) -> Any:
    return getattr(length, "free_symbols", set())


def _divides(node: fx.Node, symbols: Any) -> bool:
    """Whether a view takes dimension 0 of the activation apart into groups, [2, samples / 2, ...]."""
    found = [each for each in lengths_in(node) if _symbols(each) & symbols] if name_of(node) in VIEWS else []
    doubled = {symbol: 2 * symbol for symbol in symbols}
    return any((each.subs(doubled) - 2 * each).expand() != 0 for each in found)


def _lengths_related(node: fx.Node) -> list[Any]:
    """Lengths of the dimensions along which an op relates elements of its arguments: of all of them for an op that
    the op table does not have.
    """
    if not any(isinstance(each, Tensor) for each in _values(node)):
        return []
    given = [value for each in node.all_input_nodes for value in _values(each)]
    if is_element_wise(node):  # a number of samples is another in a sub-batch
        return given
    dims = dims_of(node)
    if dims is not None:
        pairs = [pair for each, letters in dims.given for pair in zip(letters, lengths_in(each), strict=False)]
        return [length for letter, length in pairs if dims.along.get(letter, "repeats") != "repeats"]
    return [expression(length) for value in [*given, *_values(node)]
            for length in (value.shape if isinstance(value, Tensor) else [value])]  # fmt: skip


def _values(node: fx.Node) -> list[Any]:
    """Results of a node in a trace: one or several, lengths as expressions."""
    found = value_in(node)
    return list(map(expression, found if isinstance(found, (list, tuple)) else [found]))
