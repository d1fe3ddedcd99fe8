"""Collectives without overlap: differentiable ones, for model inputs and outputs and the loss, and of parameters.

Convention: the gradient of a replicated tensor is replicated; the gradient of a shard is that of the shard. With a
group of one they return at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.core.blocks.sharding import Cut
from oases.core.execution.communication import add_wire, quantised_type
from oases.core.execution.failure import Form, begin_call, monitor_of, watch_backward
from oases.core.execution.group import ProcessGroup, group_of, group_rank, group_size, scheduler_of
from oases.distributed.dtensors import part_of_rank
from oases.plans.plan import BUCKET_BYTES


def all_reduce(x: Tensor, process_group: ProcessGroup | None, label: str, *, largest: bool = False) -> Tensor:
    """Sum `x` over the group, or take the maximum, in place and without a gradient; return `x`."""
    if group_size(process_group) > 1:
        assert process_group is not None
        scheduler = scheduler_of(process_group)
        scheduler.wait(scheduler.all_reduce(torch.view_as_real(x) if x.is_complex() else x, label, largest))
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
    if missing := max(held) - x.shape[cut.dim]:
        shape = list(x.shape)
        shape[cut.dim] = missing
        x = torch.cat([x, x.new_zeros(shape)], cut.dim)
    parts = x.new_empty((size, *x.shape))
    scheduler = scheduler_of(process_group)
    scheduler.wait(scheduler.all_gather(parts, x, label))
    if cut.dim == 0 and len(cut.segments) == 1 and min(held) == max(held):
        return parts.flatten(0, 1)  # without a copy
    return cut.join([part.narrow(cut.dim, 0, length) for part, length in zip(parts, held, strict=True)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, process_group: ProcessGroup, label: str) -> Tensor:
        ctx.cut, ctx.process_group, ctx.label = cut, process_group, label
        return all_gather_cut(x.detach(), cut, process_group, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        watch_backward(monitor_of(ctx.process_group), ctx.label)
        rank, ranks = group_rank(ctx.process_group), group_size(ctx.process_group)
        return ctx.cut.take(grad, rank, ranks).contiguous(), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, process_group: ProcessGroup, label: str) -> Tensor:
        ctx.cut, ctx.process_group, ctx.label = cut, process_group, label
        part = cut.take(x, group_rank(process_group), group_size(process_group))
        return part.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        watch_backward(monitor_of(ctx.process_group), ctx.label)
        return all_gather_cut(grad, ctx.cut, ctx.process_group, ctx.label), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: ProcessGroup, label: str) -> Tensor:
        ctx.process_group, ctx.label = process_group, label
        return all_reduce(x.contiguous().clone(), process_group, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        watch_backward(monitor_of(ctx.process_group), ctx.label)
        return grad, None, None


def gather(
    x: Tensor, process_group: ProcessGroup | None, cut: Cut | None = None, label: str = "gather output"
) -> Tensor:
    """Differentiable `all_gather_cut`. cut: even parts of the last dimension unless given."""
    size = group_size(process_group)
    if size == 1:
        return x
    return _Gather.apply(x, cut or Cut(-1, (size * x.shape[-1],)), process_group, label)


def scatter(
    x: Tensor, process_group: ProcessGroup | None, cut: Cut | None = None, label: str = "scattered input"
) -> Tensor:
    """This rank's shard of `x`, differentiable. cut: even parts of the last dimension unless given."""
    if group_size(process_group) == 1:
        return x
    return _Scatter.apply(x, cut or Cut(-1, (x.shape[-1],)), process_group, label)


def reduce(x: Tensor, process_group: ProcessGroup | None, label: str) -> Tensor:
    """Differentiable all-reduce of partial sums."""
    return x if group_size(process_group) == 1 else _Reduce.apply(x, process_group, label)


def broadcast_shares(owned: list[list[nn.Parameter]], group: ProcessGroup | None) -> None:
    """Broadcast every rank's parameters to the group, in flat tensors of one type and at most BUCKET_BYTES each."""
    for rank, parameters in enumerate(owned):
        for bucket in _buckets([part_of_rank(parameter).detach() for parameter in parameters]):
            flat = torch.cat([part.flatten() for part in bucket])
            dist.broadcast(flat, group=group, group_src=rank)
            parts: Iterable[Tensor] = flat.split([part.numel() for part in bucket])
            torch._foreach_copy_(bucket, [part.view_as(one) for part, one in zip(parts, bucket, strict=True)])


def _buckets(parameters: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    used, dtype = 0, None
    for parameter in parameters:
        if not buckets or used + parameter.nbytes > BUCKET_BYTES or parameter.dtype != dtype:
            buckets.append([])
            used, dtype = 0, parameter.dtype
        buckets[-1].append(parameter)
        used += parameter.nbytes
    return buckets


# --- agreement ---


def form_of_input(x: Tensor) -> Form:
    """Form of a layer's input, for `agreed_group`."""
    return ("shape of the input", x.shape, "type of the input", x.dtype)


def agreed_group(group_name: str, caller: str, code: str | None, option: str = "wire_dtype", about: Form = ()) -> str:
    """Name of the group that runs a caller's collectives: the one named, or its wire's, see `add_wire`.

    code: "int8" or None. Collective: the ranks compare what they give for this caller before anything is sent.
    option: what the code was given as. about: more to compare, once for each value, so that inputs of varying sizes
    do not wait for the store every time. UsageError with both codes, on all ranks, where they differ.
    """
    group = group_of(group_name)
    assert group is not None
    begin_call(group, caller, (option, code, *about), about=about)
    if code is None:
        return group_name
    quantised_type(option, code)
    return add_wire(group)
