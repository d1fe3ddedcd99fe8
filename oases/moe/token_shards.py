"""Division of replicated tokens over a tensor-parallel group, and the gather of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.core.blocks.sharding import Cut
from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.distributed.collectives import all_reduce, gather, scatter
from oases.errors import UsageError


def experts_are_shared(tensor_group: ProcessGroup | None, group: ProcessGroup | None, name: str) -> bool:
    """Whether the tensor-parallel ranks hold the same experts. UsageError where only some do."""
    if group_size(tensor_group) == 1:
        return False
    assert tensor_group is not None
    tensor = set(dist.get_process_group_ranks(tensor_group))
    spread = set(dist.get_process_group_ranks(group)) if group is not None else set()
    common = len(tensor & spread)
    if common not in (1, len(tensor)):
        raise UsageError(
            f"{name}: of the tensor-parallel ranks {sorted(tensor)} some, but not all, are among the expert-parallel "
            f"ranks {sorted(spread)}; give all of them, or only this rank"
        )
    return common == 1


def shard_bounds(tokens: int, group: ProcessGroup | None) -> tuple[int, int]:
    """[first, last) of this rank's share of the tokens; shares differ by one at most."""
    return Cut(0, (tokens,), level=True).ranges(group_rank(group), group_size(group))[0]


def shard_tokens(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """x: [T, ...], replicated -> this rank's share; the gradient is gathered."""
    return scatter(x, group, Cut(0, (len(x),), level=True), "gradients of shared tokens")


def gather_tokens(x: Tensor, tokens: int, group: ProcessGroup | None) -> Tensor:
    """This rank's share -> all T `tokens`, replicated; the gradient is this rank's share."""
    return gather(x, group, Cut(0, (tokens,), level=True), "outputs of shared tokens")


def sum_gradients(tensors: Sequence[Tensor], group: ProcessGroup | None, label: str) -> list[Tensor]:
    """Identity whose gradients are summed over the group, for replicated parameters."""
    if group_size(group) == 1 or not tensors:
        return list(tensors)
    return list(_SumGradients.apply(group, label, *tensors))


def total(tensors: Sequence[Tensor], group: ProcessGroup | None, label: str) -> list[Tensor]:
    """Sum each tensor over the group, all of them in one collective, without a gradient."""
    flat = all_reduce(torch.cat([each.flatten() for each in tensors]), group, label)
    parts = flat.split([each.numel() for each in tensors])
    return [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, label: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.label = group, label
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return None, None, *total(grads, ctx.group, ctx.label)
