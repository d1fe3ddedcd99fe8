"""Whether the samples of a layer's activation are independent, so that its blocks can run on sub-batches of them.

Sub-batches cut dimension 0. Where it is the sequence instead (activations of [sequence, batch, ...]), attention
relates its elements. The length of dimension 0 is a symbol in a traced graph, so ops that run along it are found by
their shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.cutting import ancestors
from oases.autotp.rules import OVER_DIMENSIONS
from oases.autotp.splitter import args_of, keyword, name_of

_PRODUCTS = {"matmul": 0, "bmm": 0, "mm": 0, "linear": 0, "baddbmm": 1, "addmm": 1}
"""Place of the factor whose last dimension is contracted."""
_MOVES = {
    "select": 0, "slice": 0, "flip": 0, "roll": 1, "cat": 0, "index_select": 0, "gather": 0, "slice_scatter": 1,
    "select_scatter": 1,
}  # fmt: skip
"""Ops that take or reorder elements along a dimension, and the place of that dimension after the first argument."""


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
        if any(_has(length, symbols) for length in _lengths_related(node)):
            return f"{node} ({node.target}) relates elements along dimension 0 of its activation"
    return ""


def _has(length: Any, symbols: Any) -> bool:
    return isinstance(length, torch.SymInt) and bool(length.node.expr.free_symbols & symbols)


def _shape(value: Any) -> tuple[Any, ...]:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def _lengths_related(node: fx.Node) -> list[Any]:
    """Lengths of the dimensions along which an op relates elements of its arguments."""
    name, args = name_of(node), args_of(node)
    if "scaled_dot_product" in name:
        return [shape[-2] for shape in map(_shape, args[:3]) if shape]
    if name in _PRODUCTS:
        return list(_shape(args[_PRODUCTS[name]])[-1:])
    if name == "einsum":
        return _contracted(args[0], args[1])
    shape = _shape(args[0] if args else None)
    if name in OVER_DIMENSIONS:
        at = 2 if name in ("linalg_vector_norm", "norm", "topk") else 1
        over = args[at] if len(args) > at else keyword(node, "dim", -1 if name in ("topk", "sort") else None)
        chosen = (
            over if isinstance(over, (list, tuple)) and over else range(len(shape)) if over in (None, []) else [over]
        )
        return [shape[int(dim)] for dim in chosen] if shape else []
    if name in _MOVES:
        rest = args[1:]
        given = rest[_MOVES[name]] if len(rest) > _MOVES[name] else keyword(node, "dim", 0)
        several = [_shape(each) for each in args[0]] if name == "cat" else [shape]
        chosen = given if isinstance(given, (list, tuple)) else [given]
        found = [each[int(dim)] for each in several for dim in chosen if each]
        kept = _shape(node)  # a slice of everything relates nothing
        return [] if name == "slice" and kept and kept[int(chosen[0])] == shape[int(chosen[0])] else found
    return []


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
