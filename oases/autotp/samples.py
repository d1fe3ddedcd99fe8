"""Check that a layer treats the samples of its activation independently, so that blocks can run on sub-batches.

Sub-batches cut dimension 0. Where it is the sequence instead (activations of [sequence, batch, ...]), attention
relates its elements. The length of dimension 0 is a symbol in a traced graph, so ops that run along it are found by
their shapes. An op that the op table does not have relates the elements of all its dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.cutting import ancestors
from oases.autotp.op_table import VIEWS, dims_of, is_element_wise, name_of, value_in


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
    found = [each.node.expr for each in _shape(node) if _has(each, symbols)] if name_of(node) in VIEWS else []
    doubled = {symbol: 2 * symbol for symbol in symbols}
    return any((expression.subs(doubled) - 2 * expression).expand() != 0 for expression in found)


def _values(node: fx.Node) -> list[Any]:
    """Results of a node in a trace: one or several."""
    found = value_in(node)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _lengths_related(node: fx.Node) -> list[Any]:
    """Lengths of the dimensions along which an op relates elements of its arguments."""
    if not any(isinstance(each, Tensor) for each in _values(node)):
        return []
    if is_element_wise(node):  # a number of samples is another in a sub-batch
        return [value for each in node.all_input_nodes for value in _values(each)]
    dims = dims_of(node)
    if dims is not None:
        return [length for each, letters in dims.given for letter, length in zip(letters, _shape(each), strict=False)
                if dims.along.get(letter, "repeats") != "repeats"]  # fmt: skip
    values = [value for each in [*node.all_input_nodes, node] for value in _values(each)]
    return [length for value in values for length in (value.shape if isinstance(value, Tensor) else [value])]


def _shape(node: fx.Node) -> tuple[Any, ...]:
    found = value_in(node)
    return tuple(found.shape) if isinstance(found, Tensor) else ()
