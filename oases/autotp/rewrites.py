"""Rewrites of a traced layer's graph to the few forms that the sharding rules know."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx


def inline_grad_modes(program: torch.export.ExportedProgram) -> None:
    """Move what runs under torch.no_grad() into the graph; its results are detached instead."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, inner, *given = node.args
        body = getattr(program.graph_module, inner.target).graph
        places = dict(zip([each for each in body.nodes if each.op == "placeholder"], given, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(body, places)
            results = [results] if isinstance(results, fx.Node) else list(results)
            if not enabled:
                results = [_emit(graph, torch.ops.aten.detach.default, (each,), each) for each in results]
        for user in list(node.users):  # takes one of the results
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not inner.users:
            graph.erase_node(inner)
    program.graph_module.recompile()


def differentiable_copies(graph: fx.Graph) -> bool:
    """Replace `copy`, in which a decomposed `x[...] = y` ends and which has no derivative. False for a y of another
    shape.
    """
    for node in list(graph.nodes):
        if str(node.target) != "aten.copy.default":
            continue
        target: Any = node.args[0]
        into, source = (each.meta["val"] for each in node.args[:2])
        if into.shape != source.shape:
            return False
        like = {"dtype": into.dtype, "device": into.device}
        with graph.inserting_before(node):
            copied = _emit(graph, torch.ops.aten._to_copy.default, (node.args[1],), node, **like)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)
        while (
            target.op == "call_function" and not target.users and _is_view(target)
        ):  # the part that was written to, which nothing reads now
            whole: Any = target.args[0]
            graph.erase_node(target)
            target = whole
    return True


def _emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
    """Call an op whose result has shape and type of the node `like`."""
    made = graph.call_function(target, args, kwargs)
    made.meta["val"] = like.meta["val"]
    return made


def drop_asserts(graph: fx.Graph) -> None:
    """Remove assertions; a program's shapes are checked before it runs."""
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        if node.op == "call_function" and ("_assert" in name or "sym_constrain_range" in name) and not node.users:
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):  # nodes that only assertions read
        if node.op == "call_function" and not node.users and not getattr(node.target, "_schema", None):
            graph.erase_node(node)


_MAY_ALIAS = ("dropout", "type_as", "atleast_", "broadcast_tensors", "unsafe_chunk")
"""Ops that may return their input, or views of it, though their schema does not say so."""


def without_in_place(graph: fx.Graph) -> fx.Graph | None:
    """The graph with `x = x.add(y)` for `x.add_(y)`, and `x = slice_scatter(x, y, 0, 2)` for `x[:2] = y`.

    Itself where it has no such op, else a copy. None where that is not possible: for inputs, and for values of which
    another view is read later.
    """
    if not any(_mutates(node) for node in graph.nodes):
        return graph
    graph = copy.deepcopy(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    latest: dict[fx.Node, fx.Node] = {}  # by value, the result of the last op on a part of it, which aliases it
    for node in [each for each in graph.nodes if _mutates(each)]:
        functional, at = _functional(node), order[node]
        target, views = _taken_from(node.args[0])
        if functional is None or target.op == "placeholder" or _is_view(target) or target in latest.values():
            return None
        others = _aliases([target, *([latest[target]] if target in latest else [])]) - {target}
        if any(order[alias] < at < order[user] for alias in others for user in alias.users):
            return None
        node.target = functional
        made = node
        for view in views:
            with graph.inserting_after(made):
                whole: Any = view.args[0]
                made = _emit(graph, _SCATTERS[view.target], (whole, made, *view.args[1:]), whole)
            order[made] = at
        for user in [each for each in target.users if order[each] > at]:
            user.replace_input_with(target, made)
        if made is not node:
            latest[made] = node
    return graph


_SCATTERS: dict[Any, Any] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
"""Ops that put a part of a tensor in its place, by the op that takes it."""


def _functional(node: fx.Node) -> Any:
    """The op that returns what an op in place writes; None where there is none."""
    base, _, overload = str(node.target).removeprefix("aten.").partition(".")
    known = base.endswith("_") and isinstance(node.args[0], fx.Node)
    return getattr(getattr(torch.ops.aten, base[:-1], None), overload, None) if known else None


def _taken_from(part: Any) -> tuple[Any, list[fx.Node]]:
    """The value that a tensor is a part of, and the views that take it, the smallest first."""
    views = []
    while isinstance(part, fx.Node) and part.target in _SCATTERS and not part.kwargs:
        if not _takes_all(part):
            views.append(part)
        part = part.args[0]
    return part, views


def _takes_all(view: fx.Node) -> bool:
    """Whether a slice is one of everything, as of dimensions that `x[..., :2]` passes over."""
    if view.target is not torch.ops.aten.slice.Tensor:
        return False
    first, last, step = [*view.args, None, None, None][2:5]
    return first in (None, 0) and last in (None, sys.maxsize) and step in (None, 1)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _aliases(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and views of them."""
    found, queue = set[fx.Node](), list(nodes)
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += [user for user in node.users if _is_view(user)]
    return found


def _is_view(node: fx.Node) -> bool:
    """Whether a node may be a view of its input."""
    if "getitem" in str(node.target):  # one of several results: a view for split, a new tensor for top-k
        return _is_view(node.all_input_nodes[0])
    returned = getattr(getattr(node.target, "_schema", None), "returns", ())
    aliases = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
    return aliases or any(name in str(node.target) for name in _MAY_ALIAS)


def normalise_linears(graph: fx.Graph, parameters: Mapping[str, str]) -> None:
    """Rewrite `x @ weight.T` as a linear."""
    for node in graph.nodes:
        if str(node.target) not in ("aten.matmul.default", "aten.mm.default"):
            continue
        turned = node.args[1]
        flips = ("aten.numpy_T.default", "aten.t.default", "aten.transpose.int", "aten.mT.default")
        if str(turned.target) in flips and turned.args[0].name in parameters and turned.meta["val"].dim() == 2:
            node.target, node.args = torch.ops.aten.linear.default, (node.args[0], turned.args[0])
            if not turned.users:
                graph.erase_node(turned)
