"""Rewrites of a traced layer's graph to the few forms that the sharding rules know."""

from __future__ import annotations

from collections.abc import Mapping
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
        target, source = (each.meta["val"] for each in node.args[:2])
        if target.shape != source.shape:
            return False
        like = {"dtype": target.dtype, "device": target.device}
        with graph.inserting_before(node):
            copied = _emit(graph, torch.ops.aten._to_copy.default, (node.args[1],), node, **like)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)
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


_VIEWS = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "slice",
    "select",
    "expand",
    "squeeze",
    "split",
    "chunk",
    *("flatten", "unbind", "aten.t.", "numpy_T", "aten.mT", "aten.mH", "aten.H.", "narrow", "movedim", "swapaxes"),
    *("detach", "alias", "contiguous", "aten.to.", "diagonal", "unfold", "lift_fresh", "as_strided", "type_as"),
    *(
        "ravel",
        "atleast_",
        "broadcast",
        "real",
        "imag",
        "unsafe_chunk",
        "swapdims",
        "moveaxis",
        "dropout",
        "expand_as",
    ),
)


def without_in_place(graph: fx.Graph) -> bool:
    """Replace `x.add_(y)` by `x = x.add(y)` for later readers of x. Returns False where that is not possible."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        base, _, overload = str(node.target).removeprefix("aten.").partition(".")
        target = node.args[0]
        aliased = not isinstance(target, fx.Node) or target.op == "placeholder" or _looks_like_view(target)
        aliased = aliased or any(_looks_like_view(user) and order[user] < order[node] for user in target.users)
        functional = getattr(getattr(torch.ops.aten, base.rstrip("_"), None), overload, None)
        if aliased or functional is None or not base.endswith("_"):
            return False
        node.target = functional
        target.replace_all_uses_with(node, delete_user_cb=lambda user, at=order[node]: order[user] > at)
    return True


def _looks_like_view(node: fx.Node) -> bool:
    if "getitem" in str(node.target):  # one of several results: a view for split, a new tensor for top-k
        return _looks_like_view(node.all_input_nodes[0])
    return any(name in str(node.target) for name in _VIEWS)


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
