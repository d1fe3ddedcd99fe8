"""Sharding rules of element-wise functions, linears and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.export import UnsplittableError
from oases.autotp.shapes import copies_of
from oases.autotp.splitter import Split, Splitter, Value, args_of, name_of, rule

_SAME = ("neg", "contiguous", "clone", "alias", "detach", "to", "_to_copy", "type_as")
"""Linear functions of one tensor (type_as reads another's type)."""


ELEMENT_WISE = (
    *(
        "mul",
        "div",
        "add",
        "sub",
        "rsub",
        "neg",
        "pow",
        "where",
        "masked_fill",
        "silu",
        "softplus",
        "relu6",
        "hardtanh",
    ),
    *("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach", "full_like", "zeros_like", "ones_like"),
)
"""Ops besides those that torch tags as pointwise."""

OVER_DIMENSIONS = (
    *("sum", "mean", "amax", "amin", "var", "norm", "linalg_vector_norm", "argmax", "topk", "sort"),
    *("softmax", "_softmax", "log_softmax", "logsumexp", "cumsum"),
)


def tensors(node: fx.Node) -> list[fx.Node]:
    """The arguments that are tensors, each once."""
    return [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]


@rule(*ELEMENT_WISE)
def element_wise(s: Splitter, node: fx.Node) -> Value:
    """Element-wise: sharded inputs must be sharded alike; replicated ones are sliced or broadcast."""
    found = tensors(node)
    if any(s.value(each).partial for each in found):
        value = _of_partial(s, node)
        if value is not None:
            return value
    splits = {Split(at, v.split.segments) for each in found if (v := s.value(each)).split is not None
              for at in [v.split.dim + len(s.shape(node)) - len(s.shape(each))]}  # fmt: skip
    if not splits:
        return Value(s.copy(node))
    if len(splits) > 1:
        raise UnsplittableError(f"{node.target} combines tensors sharded along {splits}")
    (split,) = splits
    return s.split(s.copy(node, aligned(s, found, split, len(s.shape(node)))), split.dim, split.segments)


def aligned(s: Splitter, found: list[fx.Node], split: Split, dims: int) -> dict[fx.Node, fx.Node]:
    """Each input's node on this rank, where the result, of `dims` dimensions, is sharded by `split`."""
    given = {}
    for each in found:
        if s.value(each).split is not None:
            given[each] = s.value(each).node
            continue
        shape = s.shape(each)
        at = split.dim - (dims - len(shape))
        broadcast = at < 0 or shape[at] == 1
        given[each] = s.entered(each) if broadcast else s.part(each, at, split.segments)
    return given


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


@rule("linear")
def linear(s: Splitter, node: fx.Node) -> Value:
    """Linear: column-parallel where chosen; row-parallel where its input is sharded along the features."""
    x, weight, *rest = args_of(node)
    return _linear(s, node, x, weight, rest[0] if rest else None, transposed=False)


@rule("addmm")
def addmm(s: Splitter, node: fx.Node) -> Value:
    """`bias + x @ weight`, as in GPT-2."""
    bias, x, weight, *_ = args_of(node)
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")) or not s.is_parameter(weight):
        return batched(s, node) if s.value(x).split is not None else Value(s.copy(node))
    return _linear(s, node, x, weight, bias, transposed=True)


@rule("mm", "matmul")
def matmul(s: Splitter, node: fx.Node) -> Value:
    """`x @ weight` with a parameter; else a batched matmul."""
    x, weight = args_of(node)
    if s.is_parameter(weight) and len(s.shape(weight)) == 2:
        return _linear(s, node, x, weight, None, transposed=True)
    return batched(s, node)


def _linear(s: Splitter, node: fx.Node, x: Any, weight: Any, bias: Any, *, transposed: bool) -> Value:
    """x times a weight [out, in], or [in, out] if transposed."""
    outputs, inputs = (1, 0) if transposed else (0, 1)
    last = len(s.shape(x)) - 1
    if node in s.columns:
        segments = s.columns[node]
        # Of few keys the weights are whole, and each rank computes its heads.
        cut = s.part if copies_of(segments) > 1 else s.cut
        given = cut(weight, outputs, segments), None if bias is None else cut(bias, 0, segments)
        result = s.call(s.linear, (s.entered(x), *given, transposed), node)
        return s.split(result, last, segments, _named(s, weight))
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


def _named(s: Splitter, weight: Any) -> str:
    return s.exported.parameters.get(getattr(weight, "name", ""), str(weight))


@rule("bmm", "baddbmm", "linalg_solve_triangular")
def batched(s: Splitter, node: fx.Node) -> Value:
    """Matmul over the last two dimensions, or a solve in them, sharded along an earlier one."""
    found = tensors(node)
    dims = len(s.shape(node))
    splits = {Split(v.split.dim + dims - len(s.shape(each)), v.split.segments)
              for each in found if (v := s.value(each)).split is not None}  # fmt: skip
    if not splits:
        return Value(s.copy(node))
    split = next(iter(splits))
    if len(splits) > 1 or split.dim >= dims - 2:
        raise UnsplittableError(f"{node.target} multiplies tensors sharded along {splits}")
    return s.split(s.copy(node, aligned(s, found, split, dims)), split.dim, split.segments)


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


@rule("layer_norm", "rms_norm", "_fused_rms_norm", "group_norm")
def norm(s: Splitter, node: fx.Node) -> Value:
    """Norm over the last dimensions, which must not be sharded."""
    x = args_of(node)[0]
    split = s.value(x).split
    if split is None:
        return Value(s.copy(node))
    over = args_of(node)[1]
    if name_of(node) == "group_norm" or split.dim >= len(s.shape(x)) - len(over):
        raise UnsplittableError(f"{node.target} needs a replicated input")
    given = {each: s.entered(each) for each in tensors(node) if each is not x}
    return Value(s.copy(node, {**given, x: s.value(x).node}), split)


@rule(*OVER_DIMENSIONS)
def over_dimensions(s: Splitter, node: fx.Node) -> Value:
    """Reduction along dimensions that must not be sharded."""
    x = args_of(node)[0]
    split = s.value(x).split
    if split is None:
        return Value(s.copy(node))
    at = 2 if name_of(node) in ("linalg_vector_norm", "norm", "topk") else 1
    given = args_of(node)[at] if len(args_of(node)) > at else None
    dims = len(s.shape(x))
    if given is None or name_of(node) in ("topk", "sort"):
        raise UnsplittableError(f"{node.target} needs a replicated input")
    over = {d % dims for d in (given if isinstance(given, (list, tuple)) else [given])}
    if split.dim in over and s.sums and name_of(node) in ("sum", "mean") and split.copies == 1:
        total = s.copy(node, {x: s.value(x).node})
        if name_of(node) == "mean":
            total = s.call(torch.ops.aten.div.Scalar, (total, s.ranks), node)
        return Value(total, None, True)
    if split.dim in over:
        raise UnsplittableError(f"{node.target} runs along the sharded dimension")
    gone = len([d for d in over if d < split.dim]) if len(s.shape(node)) < dims else 0
    return s.split(s.copy(node, {x: s.value(x).node}), split.dim - gone, split.segments)


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
        return args[0], args[1], args[2] if len(args) > 2 else None, False
    if name == "addmm":
        return args[1], args[2], args[0], True
    return args[0], args[1], None, True
