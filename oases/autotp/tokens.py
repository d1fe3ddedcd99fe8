"""Graphs of a block for parts of the sequence: a rank's, under sequence parallelism, or sub-batches of tokens.

Under sequence parallelism a block becomes three graphs: `prepare` (its norm) and `combine` (bias, dropout, residual)
run on the part, `product` on the gathered sequence. For sub-batches of tokens it becomes two: `combine`, and
`partial`, which runs on the part if it can and else on all tokens. What runs on a part must treat tokens
independently: every op in it is followed from the activation's dimension 1, and ops that relate tokens are refused.
So is one that reads another tensor along the sequence, unless that is an input that is cut as the activation is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.cutting import Piece, ancestors, is_random, piece_between
from oases.autotp.export import UnsplittableError, shape_of
from oases.autotp.lowering import block_dropout, block_linear
from oases.autotp.rules import ELEMENT_WISE, OVER_DIMENSIONS
from oases.autotp.shapes import viewed
from oases.autotp.splitter import Split, args_of, enter, keyword, name_of

_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
_NORMS = ("layer_norm", "rms_norm", "_fused_rms_norm")


@dataclass(frozen=True)
class TokenPieces:
    """Graphs of a block under sequence parallelism."""

    prepare: Piece
    product: Piece
    combine: Piece


@dataclass(frozen=True)
class SubBatchPieces:
    """Graphs of a block for sub-batches of tokens, whose sums are [batch, sequence, ...].

    token_wise: whether `partial` relates no tokens; else it must get all of them. dims: by input (placeholder) that
    they read a part of, the dimension of its tokens.
    """

    partial: Piece
    combine: Piece
    token_wise: bool
    dims: Mapping[str, int]


def token_pieces(graph: fx.Graph, x: fx.Node, begin: fx.Node, sums: list[fx.Node], end: fx.Node) -> TokenPieces:
    """Cut one block of a rank's graph. x: the layer's activation; begin, end: activations before and after the block.

    sums: all-reduces of the block. Raises UnsplittableError where what follows the sums relates tokens.
    """
    tokens = Tokens(graph, x)
    along, of_sums = tokens.of_activation, tokens.of_sums(sums)
    combine = _combine(tokens, begin, sums, end, {})
    targets = [node.args[0] for node in sums]
    border = _border(graph, x, begin, targets, tokens, along)
    product = piece_between(graph, x, [border], targets)
    if of_sums != along:
        product = _sums_in_two_dimensions(product)
    return TokenPieces(piece_between(graph, x, [begin], [border], tokens.length), product, combine)


def sub_batch_pieces(
    graph: fx.Graph, x: fx.Node, begin: fx.Node, sums: list[fx.Node], end: fx.Node
) -> SubBatchPieces:
    """The same for sub-batches of tokens."""
    tokens = Tokens(graph, x)
    along, of_sums, inputs = tokens.of_activation, tokens.of_sums(sums), tokens.inputs()
    combine = _combine(tokens, begin, sums, end, inputs)
    targets: list[Any] = [node.args[0] for node in sums]
    try:
        found = tokens.followed(ancestors(targets, {begin}), {begin: along, **inputs})
        token_wise = all(found.get(node) == of_sums for node in targets)
    except UnsplittableError:
        token_wise = False
    partial = piece_between(graph, x, [begin], targets, tokens.length if token_wise else None)
    if of_sums != along:
        partial = _sums_in_two_dimensions(partial)
    reads = {*combine.reads, *(partial.reads if token_wise else ())}
    dims = {str(node.target): split.dim for node, split in inputs.items() if node.target in reads}
    return SubBatchPieces(partial, combine, token_wise, dims)


def _combine(
    tokens: Tokens, begin: fx.Node, sums: list[fx.Node], end: fx.Node, inputs: Mapping[fx.Node, Split]
) -> Piece:
    """The graph after the sums, of a part of the sequence. inputs: of which it reads the part, too."""
    along, of_sums = tokens.of_activation, tokens.of_sums(sums)
    given = {begin: along, **dict.fromkeys(sums, of_sums), **inputs}
    found = tokens.followed(ancestors([end], {begin, *sums}), given)
    if end not in (begin, *sums) and found[end] != along:
        raise UnsplittableError(f"its result {end} does not have the sequence as dimension 1")
    combine = piece_between(tokens.graph, tokens.x, [begin, *sums], [end], tokens.length)
    return combine if of_sums == along else _sums_of_one_dimension(combine)


def _sums_in_two_dimensions(product: Piece) -> Piece:
    """A product whose sum is [batch * sequence, ...] -> [batch, sequence, ...], to be scattered."""
    run = product.run
    return Piece(lambda h, *read: run(h, *read).unflatten(0, h.shape[:2]), product.reads)


def _sums_of_one_dimension(combine: Piece) -> Piece:
    """The `combine` that reads such a sum."""
    run = combine.run
    return Piece(lambda x, y, *read: run(x, y.flatten(0, 1), *read), combine.reads)


def _border(graph: fx.Graph, x: fx.Node, begin: fx.Node, targets: list[Any], tokens: Tokens, along: Split) -> fx.Node:
    """Last node that is computed token by token from `begin` and that the targets depend on alone; else `begin`."""
    needed = ancestors(targets, {begin})
    for node in reversed([each for each in graph.nodes if each in needed]):
        if _lengths(node) != _lengths(x) or begin in ancestors(targets, {node}):
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


def _lengths(node: fx.Node) -> tuple[Any, ...]:
    """Full shape of a node; a dynamic length is its expression."""
    value = node.meta["like"].meta.get("val") if "like" in node.meta else None
    return tuple(_expression(each) for each in value.shape) if isinstance(value, Tensor) else ()


def _uncopied(node: fx.Node) -> fx.Node:
    """Source of a chain of copies: the copy of an addend has the shape of the sum in its meta."""
    while name_of(node) in ("clone", "alias", "detach", "contiguous", "to", "_to_copy"):
        node = args_of(node)[0]
    return node


def _expression(length: Any) -> Any:
    return length.node.expr if isinstance(length, torch.SymInt) else length


class Tokens:
    """Follows the dimension of the tokens through a rank's graph. length: their number, an expression."""

    def __init__(self, graph: fx.Graph, x: fx.Node) -> None:
        lengths = _lengths(x)
        if len(lengths) < 3:
            raise UnsplittableError(f"its activation has {len(lengths)} dimensions; [batch, sequence, ...] is needed")
        if isinstance(lengths[1], int) or lengths[0] == lengths[1]:
            raise UnsplittableError("its graph is valid for one length of the sequence alone")
        self.graph, self.x = graph, x
        self.batch, self.length = lengths[:2]
        self.of_activation = Split(1, (shape_of(x.meta["like"])[1],))

    def of_sums(self, sums: list[fx.Node]) -> Split:
        """Where a block's sums have the tokens: as the activation, or in dimension 0, with the batch."""
        flat = [self._is_flat(node) for node in sums]
        for node, its in zip(sums, flat, strict=True):
            if its != flat[0] or not (its or _lengths(node)[:2] == _lengths(self.x)[:2]):
                raise UnsplittableError(f"its sum {node} is not of [batch, sequence, ...]")
        batch, segments = shape_of(self.x.meta["like"])[0], self.of_activation.segments
        return Split(0, segments * batch) if flat[0] else self.of_activation

    def inputs(self) -> dict[fx.Node, Split]:
        """Where inputs besides the activation have the tokens; without those that have them in several dimensions."""
        found = {}
        for node in self.graph.nodes:
            if node.op != "placeholder" or node is self.x:
                continue
            dims = [dim for dim, length in enumerate(_lengths(node)) if length == self.length]
            if len(dims) == 1:
                found[node] = Split(dims[0], self.of_activation.segments)
        return found

    def _is_flat(self, node: fx.Node) -> bool:
        """Whether dimension 0 of a node is batch and sequence in one."""
        first = _lengths(node)[0]
        return bool(not isinstance(first, int) and (first - self.batch * self.length).expand() == 0)

    def followed(self, needed: set[fx.Node], given: Mapping[fx.Node, Split]) -> dict[fx.Node, Any]:
        """Where each node has the tokens: a Split, a list of them for several results, None for nowhere.

        Raises UnsplittableError for ops that relate tokens.
        """
        found: dict[fx.Node, Any] = dict(given)
        for node in self.graph.nodes:
            if node in needed and node not in found:
                found[node] = None if node.op == "placeholder" else self._followed(node, found)
        return found

    def _followed(self, node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
        value = node.meta["like"].meta.get("val") if "like" in node.meta else None
        if isinstance(value, (torch.SymInt, int)):
            return None  # a length: of this rank's part where it is read from the activation
        inside = {each: found[each] for each in node.all_input_nodes if found.get(each) is not None}
        name, lengths = name_of(node), [each for each in node.all_input_nodes if self._counts_tokens(each)]
        if not inside:
            if lengths:
                raise self._refused(node, "reads the length of the sequence")
            return None
        if "getitem" in name:
            source, place = args_of(node)
            several = inside[source]
            return several[place] if isinstance(several, list) else several
        if value is None:
            raise self._refused(node, "may relate tokens")
        if name in _VIEWS:
            return self._viewed(node, inside)
        if lengths:
            raise self._refused(node, "reads the length of the sequence")
        return self._of_op(node, name, inside)

    def _of_op(self, node: fx.Node, name: str, inside: Mapping[fx.Node, Split]) -> Any:
        if node.target in (enter, block_dropout):
            split = inside[node.args[0]]  # type: ignore[index]
            if node.target is block_dropout and (split.dim != 1 or _lengths(node)[0] != self.batch):
                raise self._refused(node, "draws a mask of another shape than [batch, sequence, ...]")
            return split
        if is_random(node):
            raise self._refused(node, "draws random numbers")
        if node.target is block_linear or name in _NORMS:
            (x, *_), (split, *others) = node.args, inside.values()
            last = len(_lengths(x)) - (1 if node.target is block_linear else len(node.args[1]))  # type: ignore[arg-type]
            if others or x not in inside or split.dim >= last:
                raise self._refused(node, "contracts the sequence")
            return [split] * 2 if name == "_fused_rms_norm" else split
        if name in OVER_DIMENSIONS:
            return self._over_dimensions(node, name, inside)
        if name in ELEMENT_WISE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._element_wise(node, inside)
        if name in ("transpose", "unsqueeze", "slice", "split", "split_with_sizes", "chunk", "cat"):
            return self._moved(node, name, inside)
        raise self._refused(node, "may relate tokens")

    def _element_wise(self, node: fx.Node, inside: Mapping[fx.Node, Split]) -> Split:
        dims = len(_lengths(node))
        places = {Split(s.dim + dims - len(_lengths(each)), s.segments) for each, s in inside.items()}
        if len(places) > 1:
            raise self._refused(node, "combines tokens with others")
        (split,) = places
        for each in node.all_input_nodes:
            lengths = _lengths(_uncopied(each))
            at = split.dim - (dims - len(lengths))
            if each not in inside and at >= 0 and lengths[at:] and lengths[at] != 1:
                raise self._refused(node, f"reads {each} along the sequence")
        return split

    def _over_dimensions(self, node: fx.Node, name: str, inside: Mapping[fx.Node, Split]) -> Split | list[Split]:
        x = node.args[0]
        split, dims = inside[x], len(_lengths(x))  # type: ignore[index, arg-type]
        at = 2 if name in ("linalg_vector_norm", "norm", "topk") else 1
        over = node.args[at] if len(node.args) > at else None
        if over is None or name == "sort":
            raise self._refused(node, "runs along the sequence")
        gone = {d % dims for d in (over if isinstance(over, (list, tuple)) else [over])}  # type: ignore[operator]
        if split.dim in gone:
            raise self._refused(node, "runs along the sequence")
        if name == "topk":
            return [split] * 2
        fewer = len([d for d in gone if d < split.dim]) if len(_lengths(node)) < dims else 0
        return Split(split.dim - fewer, split.segments)

    def _moved(self, node: fx.Node, name: str, inside: Mapping[fx.Node, Split]) -> Split | list[Split]:
        """Split of the result of an op that permutes, cuts or joins other dimensions."""
        splits = set(inside.values())
        dims = len(_lengths(next(iter(inside))))
        rest = args_of(node)[1:]
        if len(splits) > 1 or (name == "cat" and len(inside) < len(node.all_input_nodes)):
            raise self._refused(node, "combines tokens with others")
        (split,) = splits
        if name == "transpose":
            first, second = (int(d) % dims for d in rest)
            return Split({first: second, second: first}.get(split.dim, split.dim), split.segments)
        if name == "unsqueeze":
            return Split(split.dim + (int(rest[0]) % (dims + 1) <= split.dim), split.segments)
        at = 0 if name in ("slice", "cat") else 1
        dim = int(rest[at] if len(rest) > at else keyword(node, "dim", 0)) % dims
        if dim == split.dim:
            raise self._refused(node, "cuts or joins the sequence")
        several = isinstance(node.meta["like"].meta["val"], (list, tuple))
        return [split] * len(node.meta["like"].meta["val"]) if several else split

    def _viewed(self, node: fx.Node, inside: Mapping[fx.Node, Split]) -> Split:
        (x, split), *_ = inside.items()
        before, after = shape_of(x.meta["like"]), shape_of(node.meta["like"])
        moved = viewed(before, after, split.dim, split.segments)
        if moved is None:
            raise self._refused(node, "mixes the sequence with another dimension")
        sizes = node.args[1] if name_of(node) in ("view", "reshape", "_unsafe_view") else ()
        for place, size in enumerate(sizes):  # type: ignore[arg-type]
            along = place == moved[0]
            if isinstance(size, fx.Node):
                kept = self._multiplies_tokens(size) if along else not self._counts_tokens(size)
            else:
                kept = not along or size == -1
            if not kept:
                raise self._refused(node, "has a fixed length of the sequence")
        if name_of(node) == "unflatten":
            raise self._refused(node, "takes a dimension apart")
        return Split(*moved)

    def _counts_tokens(self, node: fx.Node) -> bool:
        """Whether a node is a number that depends on the number of tokens."""
        value = node.meta["like"].meta.get("val") if "like" in node.meta else None
        return isinstance(value, torch.SymInt) and self.length in value.node.expr.free_symbols

    def _multiplies_tokens(self, node: fx.Node) -> bool:
        """Whether a node is the number of tokens times something else."""
        if not self._counts_tokens(node):
            return False
        found = node.meta["like"].meta["val"].node.expr
        return bool((found.subs(self.length, 2 * self.length) - 2 * found).expand() == 0)

    @staticmethod
    def _refused(node: fx.Node, why: str) -> UnsplittableError:
        like = node.meta.get("like", node)
        modules = [kind for _, kind in like.meta.get("nn_module_stack", {}).values()]
        where = f" of {str(modules[-1]).rpartition('.')[2]}" if modules else ""
        return UnsplittableError(
            f"{like} ({node.target}){where} {why}, and every rank computes it whole, beside its sums"
        )
