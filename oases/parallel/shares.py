"""Shares of parameters: which rank of a group updates each, and what it sends to the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.execution.group import ProcessGroup
from oases.plans.plan import BUCKET_BYTES


def distribute(parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Distribute parameters over ranks by size: largest first, each to the rank with the fewest elements."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: -one.numel()):
        rank = held.index(min(held))
        shares[rank].append(parameter)
        held[rank] += parameter.numel()
    return shares


def broadcast(owned: list[list[nn.Parameter]], group: ProcessGroup | None) -> None:
    """Broadcast every rank's parameters to the group, in flat tensors of one type and at most BUCKET_BYTES each."""
    for rank, parameters in enumerate(owned):
        for bucket in _buckets(parameters):
            flat = torch.cat([parameter.detach().flatten() for parameter in bucket])
            dist.broadcast(flat, group=group, group_src=rank)
            parts: Iterable[Tensor] = flat.split([parameter.numel() for parameter in bucket])
            torch._foreach_copy_(
                [parameter.detach() for parameter in bucket],
                [part.view_as(one) for part, one in zip(parts, bucket, strict=True)],
            )


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    used, dtype = 0, None
    for parameter in parameters:
        if not buckets or used + parameter.nbytes > BUCKET_BYTES or parameter.dtype != dtype:
            buckets.append([])
            used, dtype = 0, parameter.dtype
        buckets[-1].append(parameter)
        used += parameter.nbytes
    return buckets
