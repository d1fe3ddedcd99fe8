"""The norm of gradients that are spread over tensor-parallel ranks, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oases.parallel.collectives import all_reduce
from oases.parallel.group import ProcessGroup, resolve
from oases.parallel.sharding import sharded_parameters


def clip_grad_norm(model: nn.Module, max_norm: float, *, process_group: ProcessGroup | None = None) -> Tensor:
    """Scale all gradients so that the norm of the whole model's gradient is at most `max_norm`.

    Shards count once over all ranks, replicated gradients once. Returns the norm before, the same on every rank.
    """
    group = resolve(process_group)
    shards = {id(parameter) for _, parameter, _ in sharded_parameters(model)}
    squares = {True: list[Tensor](), False: list[Tensor]()}
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            squares[id(parameter) in shards].append(parameter.grad.float().square().sum())
    if not gradients:
        return torch.zeros(())
    zero = torch.zeros((), device=gradients[0].device)
    cut = all_reduce(torch.stack([zero, *squares[True]]).sum().reshape(1), group, "gradient norm")
    norm = (cut[0] + torch.stack([zero, *squares[False]]).sum()).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale)
    return norm
