"""Vocabulary-parallel cross-entropy: the logits are never gathered.

Three numbers per token cross the wire (the largest logit, the sum of exponentials, the target's logit) in place
of a row of the vocabulary. The gradient, softmax minus one-hot, is local.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oases.parallel.collectives import all_reduce
from oases.parallel.embedding import require_range
from oases.parallel.group import ProcessGroup, group_rank, group_size, resolve


def _at_least_float(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: Tensor, process_group: ProcessGroup) -> Tensor:
        part = logits.shape[-1]
        logits = _at_least_float(logits)
        largest = all_reduce(logits.amax(-1), process_group, "cross-entropy", largest=True)
        exponentials = (logits - largest.unsqueeze(-1)).exp_()
        local = targets - group_rank(process_group) * part
        mine = (local >= 0) & (local < part) & ~ignored
        local = local.where(mine, 0)
        target_logit = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - largest
        sums = torch.stack([exponentials.sum(-1), target_logit.where(mine, 0.0)])
        normalizer, target_logit = all_reduce(sums, process_group, "cross-entropy").unbind(0)
        ctx.save_for_backward(exponentials.div_(normalizer.unsqueeze(-1)), local, mine, ignored)
        return (normalizer.log() - target_logit).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        softmax, local, mine, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0)
        one_hot = torch.zeros_like(softmax).scatter_(-1, local.unsqueeze(-1), mine.unsqueeze(-1).to(softmax.dtype))
        return (softmax - one_hot) * grad.unsqueeze(-1), None, None, None


def parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, process_group: ProcessGroup | None = None, ignore_index: int = -100
) -> Tensor:
    """Mean cross-entropy in nats over logits whose vocabulary is cut over the group.

    logits: [..., vocabulary / t], this rank's part; targets: [...], indices into the whole vocabulary, the same
    on every rank; those equal to ignore_index do not count. Returns a scalar, the same on every rank.
    """
    group = resolve(process_group)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit targets of {tuple(targets.shape)}")
    if group_size(group) == 1:
        return F.cross_entropy(_at_least_float(logits).flatten(0, -2), targets.flatten(), ignore_index=ignore_index)
    ignored = targets == ignore_index
    require_range("target", targets.masked_fill(ignored, 0), logits.shape[-1] * group_size(group))
    losses: Tensor = _ParallelCrossEntropy.apply(logits, targets, ignored, group)
    return losses.sum() / (~ignored).sum()
