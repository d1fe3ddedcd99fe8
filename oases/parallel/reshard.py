"""Resharding between segments of different tensor-parallel degrees: replicas gather or split their samples.

Convention: the loss of a replica is the mean over its own samples, and gradients are averaged over the replicas of a
segment. With k times as many samples in a replica, each weighs 1 / k of its weight in one of the k replicas; so a
gradient is multiplied by k on its way into them, and divided by k on its way out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oases.execution.group import ProcessGroup, group_rank, scheduler_of
from oases.parallel.mesh import Mesh


def reshard(x: Tensor, degree: int, other: int, mesh: Mesh) -> Tensor:
    """[samples, ...] of a segment of `degree` -> [samples * other / degree, ...], this rank's at the degree `other`.

    Samples keep their order. Input, result and gradients are replicated over tensor-parallel groups. ValueError where
    the samples do not divide.
    """
    if degree == other:
        return x
    group = mesh.resharding(degree, other)
    label = f"reshard tp {degree} to {other}"
    assert group is not None, "different degrees need more than one rank"
    if other > degree:
        joined: Tensor = _Join.apply(x, group, label)
        return joined
    if x.shape[0] % group.size():
        raise ValueError(f"{x.shape[0]} samples do not divide over {group.size()} replicas of tp {other}")
    part: Tensor = _Share.apply(x, group, label)
    return part


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: ProcessGroup, label: str) -> Tensor:
        ctx.process_group = process_group
        return _gathered(x, process_group, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _part(grad, ctx.process_group) * ctx.process_group.size(), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: ProcessGroup, label: str) -> Tensor:
        ctx.process_group, ctx.label = process_group, f"{label}, backward"
        return _part(x, process_group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gathered(grad, ctx.process_group, ctx.label).div_(ctx.process_group.size()), None, None


def _gathered(x: Tensor, process_group: ProcessGroup, label: str) -> Tensor:
    """Samples of all ranks of the group in rank order, without a gradient."""
    x = x.contiguous()
    whole = x.new_empty((process_group.size() * x.shape[0], *x.shape[1:]))
    scheduler = scheduler_of(process_group)
    scheduler.wait(scheduler.all_gather(whole, x, label))
    return whole


def _part(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """This rank's samples, a view."""
    return x.chunk(process_group.size())[group_rank(process_group)]
