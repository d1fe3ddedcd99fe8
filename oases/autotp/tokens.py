"""Track the sequence dimension through a rank's graph, from the activation's, by the op table.

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
from oases.autotp.lowering import block_dropout
from oases.autotp.op_table import VIEWS, args_of, follow, lengths_in, name_of, value_in
from oases.autotp.shapes import Split, viewed
from oases.autotp.splitter import enter


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
        last = len(lengths_in(source)) - 1
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
        flat = [self._is_flat(node) for node in sums]
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

    def _is_flat(self, node: fx.Node) -> bool:
        """Whether dimension 0 of a node is batch and sequence in one."""
        first = lengths_in(node)[0]
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
        if others or not isinstance(split, Split) or split.dim != len(lengths_in(node)) - 2:
            raise self._refused(node, "relates tokens")
        if is_random(node) or (mask is None and not _argument(node, 5)):
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
