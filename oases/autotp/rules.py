"""Sharding rules of ops that the op table has no letters for, or that do more along a sharded dimension.

Linear functions of partial sums; linears and attention; sizes and ends that become the rank's.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from oases.autotp.export import Exported, UnsplittableError
from oases.autotp.op_table import ELEMENT_WISE, args_of, argument, dims_of, name_of, tensors
from oases.autotp.shapes import Copied, Split, copies_of, pieces, viewed
from oases.autotp.splitter import Splitter, Value, rule

_SAME = ("neg", "contiguous", "clone", "alias", "detach", "to", "_to_copy", "type_as")
"""Linear functions of one tensor (type_as reads another's type)."""


@rule(*ELEMENT_WISE)
def element_wise(s: Splitter, node: fx.Node) -> Value:
    """Element-wise; linear in partial values."""
    partial = any(s.value(each).partial for each in tensors(node))
    return (_of_partial(s, node) if partial else None) or s.mapped(node)


def _of_partial(s: Splitter, node: fx.Node) -> Value | None:
    """The partial result of a function that is linear in a partial value; None where the sum is needed first."""
    name, shape = name_of(node), s.shape(node)
    values = [
        s.value(each) if isinstance(each, fx.Node) and each in tensors(node) else None for each in args_of(node)
    ]
    first = values[0] if values else None
    if name in _SAME and first is not None and first.partial:
        # A value is summed before it is cast: in bfloat16 half the bytes of float32, and both the norm, which casts,
        # and the residual, which does not, read one sum.
        x = args_of(node)[0]
        kept = node.meta["val"].dtype == x.meta["val"].dtype and s.shape(x) == shape
        return _each(s, node, first, 0) if kept else None
    if len(values) < 2 or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
        return None
    second = values[1]
    if name == "add" and first is not None and second is not None and not (first.split or second.split):
        if first.partial and second.partial:
            return Value(s.emit(node, (first.node, second.node)), None, True, first.addends + second.addends)
        at = 0 if first.partial else 1
        if s.shape(args_of(node)[at]) != shape:
            return None
        total = first if at == 0 else second
        return Value(total.node, None, True, (*total.addends, s.whole(args_of(node)[1 - at])))
    if name in ("mul", "div"):
        at = 0 if first is not None and first.partial else 1
        factor, other = (first, second) if at == 0 else (second, first)
        if (name == "div" and at == 1) or s.shape(args_of(node)[at]) != shape:
            return None
        if other is not None and (other.partial or other.split):
            return None
        assert factor is not None
        return _each(s, node, factor, at)
    return None


def _each(s: Splitter, node: fx.Node, value: Value, at: int) -> Value:
    """Apply a linear function to a partial value and to its pending addends."""

    def applied(operand: fx.Node, *, entering: bool) -> fx.Node:
        def of_rank(arg: fx.Node) -> Any:
            return s.entered(arg) if entering else s.whole(arg)

        args = [operand if place == at else fx.map_arg(arg, of_rank) for place, arg in enumerate(args_of(node))]
        return s.emit(node, tuple(args), dict(fx.map_arg(node.kwargs, of_rank)))

    addends = tuple(applied(addend, entering=False) for addend in value.addends)
    return Value(applied(value.node, entering=True), None, True, addends)


@rule("dropout")
def dropout(s: Splitter, node: fx.Node) -> Value:
    """Dropout: a partial value is summed first, so that all ranks draw one mask."""
    x, p, train = args_of(node)
    if not train or p == 0:
        return s.value(x)
    value = s.value(x)
    if value.split is None:
        return Value(s.call(s.dropout, (s.whole(x), p, "whole"), node))
    cut = value.split.dim if len(value.split.segments) == 1 else "unknown"
    return Value(s.call(s.dropout, (value.node, p, cut), node), value.split)


@rule("linear", "addmm", "mm", "matmul")
def linear(s: Splitter, node: fx.Node) -> Value:
    """Linear: column-parallel where chosen; row-parallel where its input is sharded along the features."""
    x, weight, bias, transposed = linear_operands(node)
    scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    if transposed and (scaled or not s.is_parameter(weight) or len(s.shape(weight)) != 2):
        return s.mapped(node)
    outputs, inputs = (1, 0) if transposed else (0, 1)
    last = len(s.shape(x)) - 1
    if node in s.columns:
        segments = s.columns[node]
        # Of few keys the weights are whole, and each rank computes its heads.
        cut = s.part if copies_of(segments) > 1 else s.cut
        given = cut(weight, outputs, segments), None if bias is None else cut(bias, 0, segments)
        result = s.call(s.linear, (s.entered(x), *given, transposed), node)
        return s.split(result, last, segments, weight_of(s.exported, node) or str(weight))
    value = s.value(x)
    if value.split is not None and value.split.dim == last:
        if not s.is_parameter(weight):
            raise UnsplittableError(f"{node} contracts a sharded dimension with a weight that is not a parameter")
        s.rows.append(node)
        result = s.call(s.linear, (value.node, s.cut(weight, inputs, value.split.segments), None, transposed), node)
        return Value(result, None, True, () if bias is None else (s.whole(bias),))
    if value.split is not None:
        given = s.entered(weight), None if bias is None else s.entered(bias)
        result = s.call(s.linear, (value.node, *given, transposed), node)
        return Value(result, value.split)
    if value.partial and bias is None and not value.addends:
        return Value(s.call(s.linear, (value.node, s.entered(weight), None, transposed), node), None, True)
    given = s.whole(weight), None if bias is None else s.whole(bias)
    return Value(s.call(s.linear, (s.whole(x), *given, transposed), node))


@rule("scaled_dot_product_attention")
def attention(s: Splitter, node: fx.Node) -> Value:
    """Attention sharded by heads, in queries, keys and values alike; grouped queries by whole groups."""
    query, key, value = args_of(node)[:3]
    splits = [s.value(each).split for each in (query, key, value)]
    if all(each is None for each in splits):
        return Value(s.copy(node))
    heads, first = len(s.shape(query)) - 3, splits[0]
    if first is None or any(each is not None and (each.dim != heads or len(each.segments) > 1) for each in splits):
        raise UnsplittableError(f"attention with queries, keys and values sharded along {splits}")
    given = {query: s.value(query).node}
    for each in (key, value):  # replicated keys and values: take those of this rank's queries
        if s.value(each).split is not None:
            given[each] = s.value(each).node
        elif s.shape(each)[heads] == s.shape(query)[heads]:
            given[each] = s.as_split(each, first)
        elif s.shape(each)[heads] == 1:  # all queries share it
            given[each] = s.entered(each)
        else:
            raise UnsplittableError("attention with fewer key heads than query heads and replicated keys")
    for mask in set(tensors(node)) - set(given):
        shape = s.shape(mask)
        if s.value(mask).split is None and (len(shape) < 3 or shape[-3] == 1):
            given[mask] = s.entered(mask)
        else:
            given[mask] = s.as_split(mask, Split(len(shape) - 3, first.segments))
    return s.split(s.copy(node, given), heads, first.segments)


@rule("sum", "mean")
def summed(s: Splitter, node: fx.Node) -> Value:
    """Sum or mean; along the sharded dimension it becomes partial, where this is asked for."""
    x = args_of(node)[0]
    split, dims = s.value(x).split, dims_of(node)
    if split is None or not s.sums or split.copies > 1 or dims is None or len(args_of(node)) < 2:
        return s.mapped(node)
    if dims.given[0][1][split.dim] not in dims.along:
        return s.mapped(node)
    total = s.copy(node, {x: s.value(x).node})
    if name_of(node) == "mean":
        total = s.call(torch.ops.aten.div.Scalar, (total, s.ranks), node)
    return Value(total, None, True)


@rule("view", "reshape", "_unsafe_view", "unflatten", "flatten")
def view(s: Splitter, node: fx.Node) -> Value:
    """View of the same elements; its sizes become the rank's."""
    x = args_of(node)[0]
    value, before, after = s.value(x), s.shape(x), s.shape(node)
    if value.split is None and not value.partial:
        return Value(s.copy(node))
    if value.split is None:
        if before[-1] != after[-1] or any(len(s.shape(each.meta["like"])) > 1 for each in value.addends):
            return Value(s.copy(node))
        return Value(_with_first(s, node, value.node), None, True, value.addends)
    if value.split.copies > 1:
        return _view_of_copies(s, node, value.node, value.split)
    found = viewed(before, after, value.split.dim, value.split.segments)
    if found is None:
        raise UnsplittableError(
            f"{node}: a view from {before} to {after} mixes the sharded dimension {value.split.dim}"
        )
    dim, segments = found
    sizes, at = args_of(node)[1], dim
    if name_of(node) == "flatten":
        return s.split(_with_first(s, node, value.node), dim, segments)
    if name_of(node) == "unflatten":
        sizes, at = args_of(node)[2], dim - int(args_of(node)[1]) % len(before)
    sizes = list(fx.map_arg(list(sizes), s.whole))
    if 0 <= at < len(sizes) and sizes[at] != -1:
        sizes[at] = _local(s, sizes[at])
    args = (value.node, sizes) if name_of(node) != "unflatten" else (value.node, args_of(node)[1], sizes)
    return s.split(s.emit(node, args), dim, segments)


def _view_of_copies(s: Splitter, node: fx.Node, x: fx.Node, split: Split) -> Value:
    """View of heads that are on several ranks each; of one that repeats keys, each rank takes its queries'."""
    before, after, copies = list(s.shape(args_of(node)[0])), s.shape(node), split.copies
    length, before[split.dim] = before[split.dim], before[split.dim] * copies
    for dim, size in enumerate(after):
        found = viewed(tuple(before), (*after[:dim], size * copies, *after[dim + 1 :]), split.dim, split.segments)
        inside = size > 1 and prod(after[:dim]) == prod(before[: split.dim])  # there are several heads
        if not inside or found is None or found[0] != dim or name_of(node) == "unflatten":
            continue
        if name_of(node) == "flatten":
            made = _with_first(s, node, x)
        else:
            sizes = list(fx.map_arg(list(args_of(node)[1]), s.whole))
            sizes[dim] = s.local(size * copies)
            made = s.emit(node, (x, sizes))
        segments = Copied(found[1], copies)
        value = s.split(made, dim, segments)
        return s.own(value.node, dim, segments) if size > length else value
    raise UnsplittableError(
        f"{node}: a view from {s.shape(args_of(node)[0])} to {after} mixes heads on several ranks"
    )


def _local(s: Splitter, size: Any) -> Any:
    if isinstance(size, int):
        return s.local(size)
    return size if s.ranks == 1 else s.graph.call_function(operator.floordiv, (size, s.ranks))


def _with_first(s: Splitter, node: fx.Node, first: fx.Node) -> fx.Node:
    """Call the op with another first argument."""
    return s.emit(node, (first, *fx.map_arg(args_of(node)[1:], s.whole)), dict(fx.map_arg(node.kwargs, s.whole)))


@rule("expand", "broadcast_to", "new_empty", "new_zeros")
def sized(s: Splitter, node: fx.Node) -> Value:
    """Expand, or make anew, as long as a tensor in its sharded dimension; the size there becomes the rank's."""
    x, given = args_of(node)[:2]
    split = s.value(x).split
    if split is None:
        return Value(s.copy(node))
    sizes = list(fx.map_arg(list(given), s.whole))
    at = split.dim + len(sizes) - len(s.shape(x))
    if at < 0 or s.shape(node)[at] != s.shape(x)[split.dim]:
        raise UnsplittableError(f"{node.target} of another shape than the sharded tensor {x}")
    if sizes[at] != -1:
        sizes[at] = _local(s, sizes[at] if split.copies == 1 else sizes[at] * split.copies)
    made = s.emit(node, (s.value(x).node, sizes), dict(fx.map_arg(node.kwargs, s.whole)))
    return s.split(made, at, split.segments)


@rule("repeat_interleave")
def repeated(s: Splitter, node: fx.Node) -> Value:
    """repeat_interleave, also along the sharded dimension, as grouped-query attention uses it."""
    x, times = args_of(node)[:2]
    split, dim = s.value(x).split, argument(node, 2, "dim")
    if split is None or not isinstance(times, int) or dim is None or dim % len(s.shape(x)) != split.dim:
        return s.mapped(node)
    segments = tuple(length * times for length in split.segments)
    made = _with_first(s, node, s.value(x).node)
    if split.copies == 1:
        return s.split(made, split.dim, segments)
    copied = Copied(segments, split.copies)
    return s.own(s.split(made, split.dim, copied).node, split.dim, copied)


@rule("slice")
def sliced(s: Splitter, node: fx.Node) -> Value:
    """Slice, along the sharded dimension at segment ends."""
    x = args_of(node)[0]
    dim, begin, end, step = args_of(node)[1:] + (0, None, None, 1)[len(args_of(node)) - 1 :]
    split, shape = s.value(x).split, s.shape(x)
    if split is None or dim % len(shape) != split.dim:
        return s.mapped(node)
    if step != 1 or isinstance(begin, fx.Node) or isinstance(end, fx.Node):
        raise UnsplittableError(f"{node.target} runs along the sharded dimension to a computed end, or in steps")
    first, last, _ = slice(begin, end).indices(shape[split.dim])
    inside = pieces(split.segments, [first, last - first, shape[split.dim] - last])
    if inside is None:
        raise UnsplittableError(f"{node.target} takes [{first}, {last}) of a tensor sharded in {split.segments}")
    if not inside[1]:
        raise UnsplittableError(f"{node.target} is empty along the sharded dimension")
    return s.split(s.emit(node, (s.value(x).node, split.dim, s.local(first), s.local(last))), split.dim, inside[1])


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def taken_apart(s: Splitter, node: fx.Node) -> Value:
    """Split, along the sharded dimension at segment ends."""
    x = args_of(node)[0]
    split, outputs = s.value(x).split, node.meta["val"]
    dim = int(argument(node, 2, "dim", 0)) % len(s.shape(x))
    if split is None or dim != split.dim:
        return s.mapped(node)
    lengths = [int(output.shape[dim]) for output in outputs]
    inside = pieces(split.segments, lengths)
    if inside is None:
        raise UnsplittableError(f"{node.target} into {lengths} of a tensor sharded in {split.segments}")
    args = s.value(x).node, [s.local(n) for n in lengths], dim
    made = s.call(torch.ops.aten.split_with_sizes.default, args, node)
    return Value(made, several=tuple(Split(dim, segments) for segments in inside))


@rule("cat", "concat", "concatenate")
def joined(s: Splitter, node: fx.Node) -> Value:
    """Concatenate; along the sharded dimension the segments follow one another."""
    given, found = args_of(node)[0], tensors(node)
    splits = {each: split for each in found if (split := s.value(each).split) is not None}
    dim = int(argument(node, 1, "dim", 0)) % len(s.shape(node))
    if {split.dim for split in splits.values()} != {dim}:
        return s.mapped(node)
    if len(splits) < len(found) or any(split.copies > 1 for split in splits.values()):
        raise UnsplittableError(f"{node.target} joins sharded and replicated tensors")
    segments = tuple(length for each in given for length in splits[each].segments)
    return s.split(s.copy(node, {each: s.value(each).node for each in found}), dim, segments)


@rule("_assert_tensor_metadata", "sym_size")
def size(s: Splitter, node: fx.Node) -> Value:
    """Length of a dimension that is not sharded."""
    x, *rest = args_of(node)
    value = s.value(x)
    if value.split is not None and rest and rest[0] % len(s.shape(x)) == value.split.dim:
        raise UnsplittableError(f"{node} reads the length of a sharded dimension")
    return Value(s.emit(node, (value.node, *rest), dict(node.kwargs)))


def is_linear(node: fx.Node) -> bool:
    """Whether a node is a linear in any spelling."""
    return node.op == "call_function" and name_of(node) in ("linear", "addmm", "mm", "matmul")


def linear_operands(node: fx.Node) -> tuple[Any, Any, Any, bool]:
    """(x, weight, bias, transposed) of a linear."""
    name, args = name_of(node), args_of(node)
    if name == "linear":
        return args[0], args[1], argument(node, 2, "bias"), False
    if name == "addmm":
        return args[1], args[2], args[0], True
    return args[0], args[1], None, True


def weight_of(exported: Exported, node: fx.Node) -> str:
    """Name in the layer of the parameter that a linear multiplies by; "" where that is no parameter."""
    return exported.parameters.get(getattr(linear_operands(node)[1], "name", ""), "")
