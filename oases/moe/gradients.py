"""Gradients of tensors that a forward pass leaves as they are, and sums of them over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oases.core.execution.group import ProcessGroup, group_size
from oases.distributed.collectives import all_reduce


def with_gradients(act: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of the tensors; their gradients are `act` of those of the views, zeros where nothing reads one."""
    return _Identity.apply(act, *tensors)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, act: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.act = act
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return None, *ctx.act(*grads)


def sum_gradients(tensors: Sequence[Tensor], group: ProcessGroup | None, label: str) -> list[Tensor]:
    """Identity whose gradients are summed over the group, for replicated parameters."""
    if group_size(group) == 1 or not tensors:
        return list(tensors)
    return list(with_gradients(lambda *grads: total(grads, group, label), *tensors))


def total(tensors: Sequence[Tensor], group: ProcessGroup | None, label: str) -> list[Tensor]:
    """Sum each tensor over the group, all of them in one collective, without a gradient."""
    flat = all_reduce(torch.cat([each.flatten() for each in tensors]), group, label)
    parts = flat.split([each.numel() for each in tensors])
    return [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]
