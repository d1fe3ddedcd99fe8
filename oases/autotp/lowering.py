"""Replace the sharding marks of a rank's graph by linears, collectives and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from oases.autotp.splitter import enter, reduce
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.distributed.collectives import all_reduce
from oases.distributed.collectives import reduce as summed
from oases.layers.dropout import masked
from oases.layers.linear import under_autocast
from oases.layers.weight_gradient import linear


@dataclass(frozen=True)
class GroupRank:
    """This process in a tensor-parallel group, which is held by name."""

    group: str = ""
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, group: ProcessGroup | None) -> GroupRank:
        """This process's rank in a group."""
        return cls(group_name(group), group_rank(group), group_size(group))


def block_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x times a weight [out, in], or [in, out] if transposed; its weight gradient may be deferred."""
    return linear(x, weight, bias, transposed=transposed)


def block_dropout(x: Tensor, p: float, cut: int | Literal["whole", "unknown"]) -> Tensor:
    """Dropout with the mask of the unsharded model inside of a stack; cut: see `whole_batch_mask`."""
    return masked(x, p, cut)


class _Enter(torch.autograd.Function):
    """Identity whose gradient is all-reduced (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous().clone(), group_of(ctx.group), "entry backward"), None


def entered(x: Tensor, group: str) -> Tensor:
    """Identity, with a gradient that is all-reduced over the group."""
    return _Enter.apply(x, group)


def total(x: Tensor, group: str) -> Tensor:
    """All-reduce over the group, with the identity as gradient (Megatron's g)."""
    return summed(x, group_of(group), "layer sum")


def row_linear(x: Tensor, weight: Tensor, group: str, transposed: bool) -> Tensor:
    """Row-parallel linear whose all-reduce overlaps with its own chunks."""
    x, weight, _ = under_autocast(x, weight.t() if transposed else weight, None)
    found: Tensor = torch.ops.oases.row_linear(x, weight, None, group, 2, False)
    return found


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """Column-parallel linear whose input gradient's all-reduce overlaps with its weight gradient."""
    x, weight, bias = under_autocast(x, weight.t() if transposed else weight, bias)
    found: Tensor = torch.ops.oases.column_linear(x, weight, bias, group, 2, False)
    return found


def lower(graph: fx.Graph, tp: GroupRank) -> fx.Graph:
    """Graph with collectives in place of its marks; a linear next to a collective of its own becomes an overlapped
    one.
    """
    made = fx.Graph()
    values: dict[fx.Node, Any] = {}
    several = tp.ranks > 1
    inside = {
        node.args[0] for node in graph.nodes if several and node.target is reduce and _is_only_use(node.args[0])
    }
    taken = {node for node in graph.nodes if several and node.target is enter and _used_by_one_linear(node)}
    for node in graph.nodes:
        if node in inside or node in taken:
            continue
        given = [values.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is reduce and node.args[0] in inside:
            x, weight, _, transposed = node.args[0].args  # type: ignore[union-attr]
            args = (values[x], values[weight], tp.group, transposed)  # type: ignore[index]
            values[node] = made.call_function(row_linear, args)
        elif node.target in (reduce, enter) and not several:
            values[node] = given[0]
        elif node.target is reduce:
            values[node] = made.call_function(total, (given[0], tp.group))
        elif node.target is enter:
            values[node] = made.call_function(entered, (given[0], tp.group))
        elif node.target is block_linear and node.args[0] in taken:
            x = values[node.args[0].args[0]]  # type: ignore[union-attr, index]
            values[node] = made.call_function(column_linear, (x, given[1], given[2], tp.group, given[3]))
        else:
            values[node] = made.node_copy(node, lambda each: values[each])
    return made


def _is_only_use(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is block_linear and len(node.users) == 1 and node.args[2] is None


def _used_by_one_linear(node: fx.Node) -> bool:
    (user, *others) = node.users or (node,)
    return not others and user.target is block_linear and user.args[0] is node and user.args[1] is not node
