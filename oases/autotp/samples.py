"""Whether the samples of a layer's activation are independent, so that its blocks can run on sub-batches of them.

Sub-batches cut dimension 0. Where it is the sequence instead (activations of [sequence, batch, ...]), attention
relates its elements. The length of dimension 0 is a symbol in a traced graph, so ops that run along it are found by
their shapes. An op that is not known to keep the elements of a dimension apart relates those of all its dimensions.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.cutting import ancestors
from oases.autotp.rules import ELEMENT_WISE
from oases.autotp.splitter import args_of, keyword, name_of

_PRODUCTS = {"matmul": 0, "bmm": 0, "mm": 0, "linear": 0, "baddbmm": 1, "addmm": 1}
"""Place of the factor whose last dimension is contracted."""
_OVER = {
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "max", "min", "aminmax"), 0),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "median", "nanmedian", "argmax", "argmin", "any"), 0),
    **dict.fromkeys(("all", "count_nonzero", "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp"), 0),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "mode", "glu"), 0),
    **dict.fromkeys(("norm", "linalg_vector_norm", "topk", "kthvalue"), 1),
    **dict.fromkeys((f"fft_{kind}{of}" for kind in ("fft", "ifft", "rfft", "irfft") for of in ("", "2", "n")), 1),
}
"""Ops that run along some dimensions or all, and the place of these after the first argument."""
_LAST = ("sort", "argsort", "mode", "glu", "topk", "kthvalue", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft")
"""Those of them that run along the last dimension where none is given."""
_MOVES = {
    **dict.fromkeys(("select", "slice", "narrow", "unbind", "flip", "cat", "index_select", "gather", "unfold"), 0),
    **dict.fromkeys(("concat", "concatenate"), 0),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill"), 0),
    **dict.fromkeys(
        ("roll", "slice_scatter", "select_scatter", "split", "split_with_sizes", "chunk", "tensor_split"), 1
    ),
}
"""Ops that take or reorder elements along a dimension, and the place of that dimension after the first argument."""
_JOINS = ("cat", "concat", "concatenate")
_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
_APART = frozenset({
    *(*_VIEWS, "view_as", "transpose", "swapaxes", "permute", "t", "movedim"),
    *( "unsqueeze", "squeeze", "expand", "expand_as", "repeat", "tile", "repeat_interleave", "stack"),
    *("view_as_complex", "view_as_real", "numpy_T", "mT", "lift_fresh_copy", "getitem"),
    *("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("empty_like", "rand_like", "randn_like", "bernoulli", "dropout", "native_dropout", "feature_dropout"),
    *("embedding", "one_hot", "bucketize", "fill", "copy", "prelu", "__and__", "__or__", "__xor__"),
    *("broadcast_to", "swapdims", "real", "imag", "polar", "hardswish", "floor_divide"),
    *("multiply", "divide", "subtract"),
    "oases.experts.default",
})  # fmt: skip
"""Ops besides element-wise ones that keep the elements of every dimension apart."""


def relation_of_samples(graph: fx.Graph, activation: str, result: Any) -> str:
    """Op by which elements along dimension 0 of the activation depend on each other, or "".

    graph: of the unsharded layer. activation: the placeholder. result: the node of the layer's first result.
    """
    (x,) = (node for node in graph.nodes if node.op == "placeholder" and node.target == activation)
    first = x.meta["val"].shape[0]
    if isinstance(first, int) or not (symbols := first.node.expr.free_symbols):
        return ""
    needed = ancestors([result], set())
    for node in (each for each in graph.nodes if each in needed and each.op == "call_function"):
        if any(_has(length, symbols) for length in _lengths_related(node)) or _divides(node, symbols):
            return f"{node} ({node.target}) relates elements along dimension 0 of its activation"
    return ""


def _has(length: Any, symbols: Any) -> bool:
    return isinstance(length, (torch.SymInt, torch.SymFloat)) and bool(length.node.expr.free_symbols & symbols)


def _divides(node: fx.Node, symbols: Any) -> bool:
    """Whether a view takes dimension 0 of the activation apart into groups, [2, samples / 2, ...]."""
    found = [each.node.expr for each in _shape(node) if _has(each, symbols)] if name_of(node) in _VIEWS else []
    doubled = {symbol: 2 * symbol for symbol in symbols}
    return any((expression.subs(doubled) - 2 * expression).expand() != 0 for expression in found)


def _shape(value: Any) -> tuple[Any, ...]:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def _values(node: fx.Node) -> list[Any]:
    """Results of a node in a trace: one or several."""
    found = node.meta.get("val")
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _lengths_related(node: fx.Node) -> list[Any]:
    """Lengths of the dimensions along which an op relates elements of its arguments."""
    name, args = name_of(node), args_of(node)
    if node.target is operator.getitem or not any(isinstance(each, Tensor) for each in _values(node)):
        return []
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in ELEMENT_WISE:
        # A number of samples is another in a sub-batch.
        return [value for each in node.all_input_nodes for value in _values(each)]
    if "scaled_dot_product" in name:
        return [shape[-2] for shape in map(_shape, args[:3]) if shape]
    if name in _PRODUCTS:
        return list(_shape(args[_PRODUCTS[name]])[-1:])
    if name == "einsum":
        return _contracted(args[0], args[1])
    shape = _shape(args[0] if args else None)
    if name in _OVER:
        return [shape[dim] for dim in _dims(node, _OVER[name], -1 if name in _LAST else None, len(shape))]
    if name in _MOVES:
        several = [_shape(each) for each in args[0]] if name in _JOINS else [shape]
        dims = _dims(node, _MOVES[name], 0, len(several[0]))
        kept = _shape(node)  # a slice of everything relates nothing
        if name == "slice" and kept and kept[dims[0]] == shape[dims[0]]:
            return []
        return [each[dim] for each in several for dim in dims if each]
    known = _of_dimensions(name, args, shape)
    if known is not None:
        return known
    values = [value for each in [*node.all_input_nodes, node] for value in _values(each)]
    return [length for value in values for length in (value.shape if isinstance(value, Tensor) else [value])]


def _dims(node: fx.Node, place: int, default: int | None, dims: int) -> list[int]:
    """Dimensions that an op runs along: those given, or the default, or all."""
    rest = args_of(node)[1:]
    given = rest[place] if len(rest) > place else keyword(node, "dim", keyword(node, "dims", default))
    if given is None or isinstance(given, bool) or given == []:  # bool: std(unbiased)
        return list(range(dims))
    return [int(dim) for dim in (given if isinstance(given, (list, tuple)) else [given])] if dims else []


def _of_dimensions(name: str, args: tuple[Any, ...], shape: tuple[Any, ...]) -> list[Any] | None:
    """Lengths of the dimensions that an op relates by its kind; None for an op that is not known."""
    if name in _APART:
        return []
    if name in _NORMS:
        return list(shape[len(shape) - len(args[1]) :])
    if name == "group_norm":
        return list(shape[1:])
    if name in ("batch_norm", "native_batch_norm", "_native_batch_norm_legit"):
        training = next(each for each in args[3:] if isinstance(each, bool))
        return [shape[0], *shape[2:]] if training else []
    if name.rstrip("123d") in ("conv", "convolution") and len(args) > 1:
        batched = len(shape) == len(_shape(args[1]))
        return list(shape[batched:])
    if name in ("tril", "triu", "linalg_solve_triangular"):
        return list(shape[-2:])
    if name in ("pad", "constant_pad_nd"):
        return list(shape[len(shape) - len(args[1]) // 2 :])
    if name in ("index", "index_put", "_unsafe_index"):
        return [length for length, index in zip(shape, args[1], strict=False) if index is not None]
    return None


def _contracted(equation: str, factors: Any) -> list[Any]:
    """Lengths of the letters of an einsum that are not in its result."""
    terms, _, kept = equation.replace(" ", "").partition("->")
    if not kept or "." in equation:
        return []
    return [
        length
        for term, factor in zip(terms.split(","), factors, strict=False)
        for letter, length in zip(term, _shape(factor), strict=False)
        if letter not in kept
    ]
