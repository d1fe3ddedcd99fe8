"""Resharding between segments of different tensor-parallel degrees: replicas gather or split their samples.

Convention: the loss of a replica is the mean over its own samples, and gradients are averaged over the replicas of a
segment. With k times as many samples in a replica, each weighs 1 / k of its weight in one of the k replicas; so a
gradient is multiplied by k on its way into them, and divided by k on its way out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oases.core.blocks.sharding import Cut
from oases.core.execution.group import ProcessGroup, group_rank
from oases.distributed.collectives import all_gather_cut
from oases.distributed.mesh import Mesh


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
        joined: Tensor = _Join.apply(x, Cut(0, (group.size() * x.shape[0],)), group, label)
        return joined
    if x.shape[0] % group.size():
        raise ValueError(f"{x.shape[0]} samples do not divide over {group.size()} replicas of tp {other}")
    part: Tensor = _Share.apply(x, Cut(0, (x.shape[0],)), group, label)
    return part


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, group: ProcessGroup, label: str) -> Tensor:
        ctx.cut, ctx.group = cut, group
        return all_gather_cut(x, cut, group, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        rank, ranks = group_rank(ctx.group), ctx.group.size()
        return ctx.cut.take(grad, rank, ranks) * ranks, None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, group: ProcessGroup, label: str) -> Tensor:
        ctx.cut, ctx.group, ctx.label = cut, group, f"{label}, backward"
        return cut.take(x, group_rank(group), group.size()).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return all_gather_cut(grad, ctx.cut, ctx.group, ctx.label).div_(ctx.group.size()), None, None, None
