"""Division of replicated tokens over a tensor-parallel group, and the gather of the results.

Convention, as in `oases.parallel.collectives`: the gradient of a replicated tensor is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_rank, group_size, scheduler_of
from oases.parallel.collectives import all_reduce


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
    rank, size = group_rank(group), group_size(group)
    return tokens * rank // size, tokens * (rank + 1) // size


def shard_tokens(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """x: [T, ...], replicated -> this rank's share; the gradient is gathered."""
    return x if group_size(group) == 1 else _ShardTokens.apply(x, group)


def gather_tokens(x: Tensor, tokens: int, group: ProcessGroup | None) -> Tensor:
    """This rank's share -> all T `tokens`, replicated; the gradient is this rank's share."""
    return x if group_size(group) == 1 else _GatherTokens.apply(x, tokens, group)


def sum_gradients(tensors: Sequence[Tensor], group: ProcessGroup | None, label: str) -> list[Tensor]:
    """Identity whose gradients are summed over the group, for replicated parameters."""
    if group_size(group) == 1 or not tensors:
        return list(tensors)
    return list(_SumGradients.apply(group, label, *tensors))


def _joined(part: Tensor, tokens: int, group: ProcessGroup, label: str) -> Tensor:
    """Gather all ranks' shares, padded to the longest for the collective."""
    size = group_size(group)
    longest = -(-tokens // size)
    padded = part.contiguous()
    if len(part) < longest:
        padded = torch.cat([padded, part.new_zeros((longest - len(part), *part.shape[1:]))])
    parts = padded.new_empty((size, *padded.shape))
    scheduler = scheduler_of(group)
    scheduler.wait(scheduler.all_gather(parts, padded, label))
    lengths = [tokens * (rank + 1) // size - tokens * rank // size for rank in range(size)]
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


class _ShardTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.tokens, ctx.group = len(x), group
        first, last = shard_bounds(len(x), group)
        return x[first:last].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _joined(grad, ctx.tokens, ctx.group, "gradients of shared tokens"), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _joined(x.detach(), tokens, group, "outputs of shared tokens")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        first, last = shard_bounds(len(grad), ctx.group)
        return grad[first:last].contiguous(), None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, label: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.label = group, label
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), ctx.group, ctx.label)
        parts = flat.split([grad.numel() for grad in grads])
        return None, None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))
