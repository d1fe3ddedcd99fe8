"""Differentiable collectives without overlap, for model inputs and outputs and the loss.

Convention: the gradient of a replicated tensor is replicated; the gradient of a shard is that of the shard. With a
group of one they return at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oases.execution.group import ProcessGroup, group_rank, group_size, scheduler_of
from oases.execution.propagation import watch_group
from oases.parallel.sharding import Cut


def all_reduce(x: Tensor, process_group: ProcessGroup | None, label: str, *, largest: bool = False) -> Tensor:
    """Sum `x` over the group, or take the maximum, in place and without a gradient; return `x`."""
    if group_size(process_group) > 1:
        assert process_group is not None
        scheduler = scheduler_of(process_group)
        scheduler.wait(scheduler.all_reduce(x, label, largest))
    return x


def all_gather_cut(x: Tensor, cut: Cut, process_group: ProcessGroup | None, label: str) -> Tensor:
    """Gather the shards that `cut` defines, without a gradient.

    Shards of unequal length are padded to the longest for the collective.
    """
    size = group_size(process_group)
    if size == 1:
        return x
    assert process_group is not None
    held = [sum(last - first for first, last in cut.ranges(rank, size)) for rank in range(size)]
    x = x.contiguous()
    if x.shape[cut.dim] < max(held):
        filling = x.new_zeros(()).expand(x.narrow(cut.dim, 0, 1).shape)
        x = torch.cat([x, *[filling] * (max(held) - x.shape[cut.dim])], cut.dim)
    parts = x.new_empty((size, *x.shape))
    scheduler = scheduler_of(process_group)
    scheduler.wait(scheduler.all_gather(parts, x, label))
    if cut.dim == 0 and len(cut.segments) == 1 and min(held) == max(held):
        return parts.flatten(0, 1)  # without a copy
    return cut.join([part.narrow(cut.dim, 0, length) for part, length in zip(parts, held, strict=True)])


def all_gather_last(x: Tensor, process_group: ProcessGroup | None, label: str) -> Tensor:
    """Gather [..., n] to [..., t * n], without a gradient."""
    return all_gather_cut(x, Cut(-1, (group_size(process_group) * x.shape[-1],)), process_group, label)


def part_of_last(x: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """This rank's part of the last dimension, a view."""
    size = group_size(process_group)
    return x if size == 1 else x.chunk(size, dim=-1)[group_rank(process_group)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, process_group: ProcessGroup, label: str) -> Tensor:
        ctx.cut, ctx.process_group, ctx.label = cut, process_group, label
        return all_gather_cut(x.detach(), cut, process_group, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        watch_group(ctx.process_group, ctx.label)
        rank, ranks = group_rank(ctx.process_group), group_size(ctx.process_group)
        return ctx.cut.take(grad, rank, ranks).contiguous(), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return part_of_last(x, process_group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        watch_group(ctx.process_group, "a scattered input")
        return all_gather_last(grad, ctx.process_group, "scatter backward"), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: ProcessGroup, label: str) -> Tensor:
        ctx.process_group, ctx.label = process_group, label
        return all_reduce(x.contiguous().clone(), process_group, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        watch_group(ctx.process_group, ctx.label)
        return grad, None, None


def gather(
    x: Tensor, process_group: ProcessGroup | None, cut: Cut | None = None, label: str = "gather output"
) -> Tensor:
    """Differentiable `all_gather_cut`. cut: even parts of the last dimension unless given."""
    size = group_size(process_group)
    if size == 1:
        return x
    return _Gather.apply(x, cut or Cut(-1, (size * x.shape[-1],)), process_group, label)


def scatter(x: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """Differentiable `part_of_last`."""
    return x if group_size(process_group) == 1 else _Scatter.apply(x, process_group)


def reduce(x: Tensor, process_group: ProcessGroup | None, label: str) -> Tensor:
    """Differentiable all-reduce of partial sums."""
    return x if group_size(process_group) == 1 else _Reduce.apply(x, process_group, label)
