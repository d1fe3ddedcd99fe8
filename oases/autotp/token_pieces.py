"""Subgraphs of a block for sequence parallelism, token sub-batches and expert dispatch.

Parts of the sequence are a rank's, under sequence parallelism, or sub-batches of tokens.
Under sequence parallelism a block becomes three graphs: `prepare` (its norm) and `combine` (bias, dropout, residual)
run on the part, `product` on the gathered sequence. For sub-batches of tokens it becomes two: `combine`, and
`partial`, which runs on the part if it can (`oases.autotp.tokens` tells) and else on all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from oases.autotp.balanced import balanced_experts
from oases.autotp.cutting import Piece, ancestors, is_random, piece_between
from oases.autotp.export import UnsplittableError
from oases.autotp.lowering import block_linear
from oases.autotp.op_table import lengths_in
from oases.autotp.shapes import Split
from oases.autotp.tokens import Tokens, cuts_of_mask, is_attention, mask_of
from oases.layers.attention import causal_attention


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
    along, of_sums = tokens.of_activation, tokens.of_sums(sums)
    targets: list[Any] = [node.args[0] for node in sums]
    masks = {node: mask_of(node) for node in ancestors(targets, {begin}) if is_attention(node)}
    inputs = {node: split for node, split in tokens.inputs().items() if node not in masks.values()}
    combine = _combine(tokens, begin, sums, end, inputs)
    relates: Literal["none", "earlier", "all"] = "all"
    try:
        needed = ancestors(targets, {begin, *(each for node in masks for each in cuts_of_mask(node))})
        found = tokens.followed(needed, {begin: along, **inputs}, causal=True)
        if all(found.get(node) == of_sums for node in targets):
            relates = "earlier" if masks else "none"
    except UnsplittableError:
        pass  # it runs on all tokens
    length = None if relates == "all" else tokens.length
    calls = {} if relates == "all" else {
        node: (causal_attention, (*node.args[:3], mask, *node.args[4:])) for node, mask in masks.items()
    }  # fmt: skip
    partial = piece_between(graph, x, [begin], targets, length, calls)
    if of_sums != along:
        partial = _sums_in_two_dimensions(partial)
    reads = {*combine.reads, *(() if relates == "all" else partial.reads)}
    dims = {str(node.target): split.dim for node, split in inputs.items() if node.target in reads}
    names = frozenset(str(mask.target) for mask in masks.values() if relates == "earlier" and mask is not None)
    return SubBatchPieces(partial, combine, relates, names, dims)


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
        if lengths_in(node) != lengths_in(x) or begin in ancestors(targets, {node}):
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


def expert_pieces(
    graph: fx.Graph, x: fx.Node, begin: fx.Node, sums: list[fx.Node], end: fx.Node
) -> ExpertPieces | None:
    """Pieces of a block, by the arguments of BlockPieces; None unless it sends tokens to experts once."""
    targets = [node.args[0] for node in sums]
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
