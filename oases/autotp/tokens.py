"""Where the tokens are in a rank's graph: their dimension is followed from the activation's through every op.

What runs on a part of the sequence must treat tokens independently: ops that relate tokens are refused, and so is one
that reads another tensor along the sequence, unless that is an input that is cut as the activation is. In a sub-batch
of tokens, causal attention may read the keys of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.cutting import is_random
from oases.autotp.export import UnsplittableError, shape_of
from oases.autotp.lowering import block_dropout, block_linear
from oases.autotp.rules import ELEMENT_WISE, OVER_DIMENSIONS
from oases.autotp.shapes import Segments, viewed
from oases.autotp.splitter import Split, args_of, enter, keyword, name_of

_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
_MOVES = (
    *("transpose", "permute", "unsqueeze", "stack"),
    *("slice", "split", "split_with_sizes", "chunk", "cat", "repeat_interleave"),
)
_NORMS = ("layer_norm", "rms_norm", "_fused_rms_norm")


def is_attention(node: fx.Node) -> bool:
    """Whether a node is torch's attention."""
    return name_of(node) == "scaled_dot_product_attention"


def _argument(node: fx.Node, place: int) -> Any:
    return node.args[place] if len(node.args) > place else None


def cuts_of_mask(node: fx.Node) -> list[fx.Node]:
    """Cuts of an attention's mask to the number of its keys, which it has already where it is square."""
    found: list[fx.Node] = []
    mask = _argument(node, 3)
    while isinstance(mask, fx.Node) and (mask.target is enter or name_of(mask) == "slice"):
        source, dim, begin, *_ = (*mask.args, -1, 0)
        last = len(lengths_of(source)) - 1  # type: ignore[arg-type]
        if begin not in (0, None) or dim not in (-1, last):
            break
        found.append(mask)
        mask = source
    return found


def mask_of(node: fx.Node) -> fx.Node | None:
    """Mask of an attention before such cuts."""
    cuts = cuts_of_mask(node)
    mask: fx.Node | None = args_of(cuts[-1])[0] if cuts else _argument(node, 3)
    return mask


def lengths_of(node: fx.Node) -> tuple[Any, ...]:
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
        lengths = lengths_of(x)
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
            if its != flat[0] or not (its or lengths_of(node)[:2] == lengths_of(self.x)[:2]):
                raise UnsplittableError(f"its sum {node} is not of [batch, sequence, ...]")
        batch, segments = shape_of(self.x.meta["like"])[0], self.of_activation.segments
        return Split(0, segments * batch) if flat[0] else self.of_activation

    def inputs(self) -> dict[fx.Node, Split]:
        """Where inputs besides the activation have the tokens; without those that have them in several dimensions."""
        found = {}
        for node in self.graph.nodes:
            if node.op != "placeholder" or node is self.x:
                continue
            dims = [dim for dim, length in enumerate(lengths_of(node)) if length == self.length]
            if len(dims) == 1:
                found[node] = Split(dims[0], self.of_activation.segments)
        return found

    def _is_flat(self, node: fx.Node) -> bool:
        """Whether dimension 0 of a node is batch and sequence in one."""
        first = lengths_of(node)[0]
        return bool(not isinstance(first, int) and (first - self.batch * self.length).expand() == 0)

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
        if others or not isinstance(split, Split) or split.dim != len(lengths_of(node)) - 2:
            raise self._refused(node, "relates tokens")
        if is_random(node) or (mask is None and not _argument(node, 5)):
            raise self._refused(node, "relates a token to later ones, or draws random numbers")
        if mask is not None and (mask.op != "placeholder" or found.get(mask) is not None):
            raise self._refused(node, "reads a mask that is no input of the layer")
        return split

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
        if "getitem" in name or "_item" in name:
            source, place = args_of(node)
            several = inside[source]
            return several[place] if isinstance(several, list) else several
        if value is None:
            raise self._refused(node, "may relate tokens")
        if name in (*_VIEWS, "expand"):
            return self._viewed(node, inside)
        if lengths:
            raise self._refused(node, "reads the length of the sequence")
        return self._of_op(node, name, inside)

    def _of_op(self, node: fx.Node, name: str, inside: Mapping[fx.Node, Split]) -> Any:
        if node.target in (enter, block_dropout):
            split = inside[node.args[0]]  # type: ignore[index]
            if node.target is block_dropout and (split.dim != 1 or lengths_of(node)[0] != self.batch):
                raise self._refused(node, "draws a mask of another shape than [batch, sequence, ...]")
            return split
        if is_random(node):
            raise self._refused(node, "draws random numbers")
        if node.target is block_linear or name in _NORMS:
            (x, *_), (split, *others) = node.args, inside.values()
            last = len(lengths_of(x)) - (1 if node.target is block_linear else len(node.args[1]))  # type: ignore[arg-type]
            if others or x not in inside or split.dim >= last:
                raise self._refused(node, "contracts the sequence")
            return [split] * 2 if name == "_fused_rms_norm" else split
        if name in OVER_DIMENSIONS:
            return self._over_dimensions(node, name, inside)
        if name in ELEMENT_WISE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._element_wise(node, inside)
        if name in _MOVES:
            return self._moved(node, name, inside)
        raise self._refused(node, "may relate tokens")

    def _element_wise(self, node: fx.Node, inside: Mapping[fx.Node, Split]) -> Split:
        dims = len(lengths_of(node))
        places = {Split(s.dim + dims - len(lengths_of(each)), s.segments) for each, s in inside.items()}
        if len(places) > 1:
            raise self._refused(node, "combines tokens with others")
        (split,) = places
        for each in node.all_input_nodes:
            lengths = lengths_of(_uncopied(each))
            at = split.dim - (dims - len(lengths))
            if each not in inside and at >= 0 and lengths[at:] and lengths[at] != 1:
                raise self._refused(node, f"reads {each} along the sequence")
        return split

    def _over_dimensions(self, node: fx.Node, name: str, inside: Mapping[fx.Node, Split]) -> Split | list[Split]:
        x = node.args[0]
        split, dims = inside[x], len(lengths_of(x))  # type: ignore[index, arg-type]
        at = 2 if name in ("linalg_vector_norm", "norm", "topk") else 1
        over = node.args[at] if len(node.args) > at else None
        if over is None or name == "sort":
            raise self._refused(node, "runs along the sequence")
        gone = {d % dims for d in (over if isinstance(over, (list, tuple)) else [over])}  # type: ignore[operator]
        if split.dim in gone:
            raise self._refused(node, "runs along the sequence")
        if name == "topk":
            return [split] * 2
        fewer = len([d for d in gone if d < split.dim]) if len(lengths_of(node)) < dims else 0
        return Split(split.dim - fewer, split.segments)

    def _moved(self, node: fx.Node, name: str, inside: Mapping[fx.Node, Split]) -> Split | list[Split]:
        """Split of the result of an op that permutes, cuts or joins other dimensions."""
        splits = set(inside.values())
        before = lengths_of(next(iter(inside)))
        dims, rest = len(before), args_of(node)[1:]
        if len(splits) > 1 or (name in ("cat", "stack") and len(inside) < len(node.all_input_nodes)):
            raise self._refused(node, "combines tokens with others")
        (split,) = splits
        if name == "transpose":
            first, second = (int(d) % dims for d in rest)
            return Split({first: second, second: first}.get(split.dim, split.dim), split.segments)
        if name == "permute":
            return Split([int(d) % dims for d in rest[0]].index(split.dim), split.segments)
        if name in ("unsqueeze", "stack"):
            new = rest[0] if rest else keyword(node, "dim", 0)
            return Split(split.dim + (int(new) % (dims + 1) <= split.dim), split.segments)
        at = 0 if name in ("slice", "cat") else 1
        dim = int(rest[at] if len(rest) > at else keyword(node, "dim", 0)) % dims
        if dim == split.dim and not (name == "slice" and lengths_of(node) == before):
            raise self._refused(node, "cuts or joins the sequence")
        several = isinstance(node.meta["like"].meta["val"], (list, tuple))
        return [split] * len(node.meta["like"].meta["val"]) if several else split

    def _viewed(self, node: fx.Node, inside: Mapping[fx.Node, Split]) -> Split:
        (x, split), *_ = inside.items()
        before, after = shape_of(x.meta["like"]), shape_of(node.meta["like"])
        name = name_of(node)
        moved: tuple[int, Segments] | None
        if name == "expand":
            moved = split.dim + len(after) - len(before), split.segments
        else:
            moved = viewed(before, after, split.dim, split.segments)
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
