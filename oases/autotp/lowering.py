"""What stands for products, sums and entries in a rank's graph when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from oases.autotp.splitter import enter, reduce
from oases.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.execution.weight_gradient import linear
from oases.parallel.collectives import all_reduce
from oases.parallel.collectives import reduce as summed
from oases.parallel.dropout import masked


@dataclass(frozen=True)
class GroupRank:
    """This process in a tensor-parallel group, which is held by name."""

    group: str = ""
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, group: ProcessGroup | None) -> GroupRank:
        """This process's place in a group."""
        return cls(group_name(group), group_rank(group), group_size(group))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x times a weight [out, in], or [in, out] if transposed; its weight gradient may be put off."""
    return linear(x, weight, bias, transposed=transposed)


def block_dropout(x: Tensor, p: float, cut: int | Literal["whole", "unknown"]) -> Tensor:
    """Dropout whose mask is that of the uncut model inside of a stack; `cut` as `whole_batch_mask` takes it."""
    return masked(x, p, cut)


class _Enter(torch.autograd.Function):
    """A whole value goes where each rank computes a part: its gradient is the sum of what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous().clone(), group_of(ctx.group), "entry backward"), None


def entered(x: Tensor, group: str) -> Tensor:
    """The identity, with a gradient that is summed over the group."""
    return _Enter.apply(x, group)


def total(x: Tensor, group: str) -> Tensor:
    """The sum over the group, whose gradient every rank has."""
    return summed(x, group_of(group), "layer sum")


def row_linear(x: Tensor, weight: Tensor, group: str, transposed: bool) -> Tensor:
    """A row-parallel product whose sum over the group hides under its own chunks."""
    found: Tensor = torch.ops.oases.row_linear(x, weight.t() if transposed else weight, None, group, 2, False)
    return found


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """A column-parallel product whose input's gradient is summed under its weight gradient."""
    weight = weight.t() if transposed else weight
    found: Tensor = torch.ops.oases.column_linear(x, weight, bias, group, 2, False)
    return found


def lower(graph: fx.Graph, place: GroupRank) -> fx.Graph:
    """A rank's graph with its sums in it: overlapped linears where a product makes or takes a sum of its own."""
    made = fx.Graph()
    values: dict[fx.Node, Any] = {}
    several = place.ranks > 1
    inside = {node.args[0] for node in graph.nodes if several and node.target is reduce and _alone(node.args[0])}
    taken = {node for node in graph.nodes if several and node.target is enter and _used_by_one_linear(node)}
    for node in graph.nodes:
        if node in inside or node in taken:
            continue
        given = [values.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is reduce and node.args[0] in inside:
            x, weight, _, transposed = node.args[0].args  # type: ignore[union-attr]
            args = (values[x], values[weight], place.group, transposed)  # type: ignore[index]
            values[node] = made.call_function(row_linear, args)
        elif node.target in (reduce, enter) and not several:
            values[node] = given[0]
        elif node.target is reduce:
            values[node] = made.call_function(total, (given[0], place.group))
        elif node.target is enter:
            values[node] = made.call_function(entered, (given[0], place.group))
        elif node.target is product and node.args[0] in taken:
            x = values[node.args[0].args[0]]  # type: ignore[union-attr, index]
            values[node] = made.call_function(column_linear, (x, given[1], given[2], place.group, given[3]))
        else:
            values[node] = made.node_copy(node, lambda each: values[each])
    return made


def _alone(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is product and len(node.users) == 1 and node.args[2] is None


def _used_by_one_linear(node: fx.Node) -> bool:
    (user, *others) = node.users or (node,)
    return not others and user.target is product and user.args[0] is node and user.args[1] is not node
