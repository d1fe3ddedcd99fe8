"""Vocabulary-parallel cross-entropy without gathering the logits.

Three numbers per token are all-reduced (maximum logit, sum of exponentials, target logit) instead of a row of the
vocabulary. The gradient, softmax minus one-hot, is local.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oases.core.blocks.sharding import Cut
from oases.core.execution.failure import monitor_of, watch_backward
from oases.core.execution.group import ProcessGroup, group_rank, group_size, resolve
from oases.distributed.collectives import agreed_group, all_reduce
from oases.layers.chunks import is_real
from oases.layers.embedding import require_range

IGNORED = -100
"""Target without a loss, as in torch and transformers."""


def _at_least_float(x: Tensor) -> Tensor:
    """In float32, or float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _ParallelCrossEntropy(torch.autograd.Function):
    """Losses per token: logits [..., part], targets and ignored [...] -> [...]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignored: Tensor,
        vocabulary: int,
        smoothing: float,
        process_group: ProcessGroup,
    ) -> Tensor:
        ((first, last),) = Cut(-1, (vocabulary,)).ranges(group_rank(process_group), group_size(process_group))
        logits = _at_least_float(logits)
        largest = all_reduce(logits.amax(-1), process_group, "cross-entropy", largest=True)
        shifted = logits - largest.unsqueeze(-1)
        mine = (targets >= first) & (targets < last) & ~ignored
        local = (targets - first).where(mine, 0)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(mine, 0.0)
        # Label smoothing adds the mean of all logits to the target.
        terms = [shifted.sum(-1)] if smoothing else []
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), picked, *terms])
        normalizer, expected, *total = all_reduce(sums, process_group, "cross-entropy").unbind(0)
        if smoothing:
            expected = (1 - smoothing) * expected + (smoothing / vocabulary) * total[0]
        ctx.save_for_backward(exponentials.div_(normalizer.unsqueeze(-1)), local, mine, ignored)
        ctx.vocabulary, ctx.smoothing, ctx.process_group = vocabulary, smoothing, process_group
        return (normalizer.log() - expected).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        watch_backward(monitor_of(ctx.process_group), "the cross-entropy")
        softmax, local, mine, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0)
        target = (ctx.smoothing - 1) * mine.unsqueeze(-1).to(softmax.dtype)
        difference = softmax.scatter_add(-1, local.unsqueeze(-1), target)
        if ctx.smoothing:
            difference -= ctx.smoothing / ctx.vocabulary
        return difference.mul_(grad.unsqueeze(-1)), None, None, None, None, None


def parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    process_group: ProcessGroup | None = None,
    ignore_index: int = IGNORED,
    vocabulary: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy in nats over vocabulary-parallel logits, as `F.cross_entropy`.

    logits: [..., vocabulary / t], this rank's part; targets: [...], indices into the full vocabulary, equal on every
    rank; those equal to ignore_index do not count. vocabulary: its full size where the parts are not equal, as `Cut`
    divides it. reduction: "mean" and "sum" return a scalar, "none" a loss per target, in float32 or float64; equal on
    every rank. ValueError for shapes that do not fit and for another reduction.
    """
    group = resolve(process_group)
    ranks = group_size(group)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit targets of {tuple(targets.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie between 0 and 1, got {label_smoothing}")
    if group is None or ranks == 1:
        losses = F.cross_entropy(
            _at_least_float(logits).flatten(0, -2) if targets.dim() else _at_least_float(logits),
            targets.flatten() if targets.dim() else targets,
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        )  # fmt: skip
        return losses.reshape(targets.shape) if reduction == "none" else losses
    vocabulary = logits.shape[-1] * ranks if vocabulary is None else vocabulary
    ((first, last),) = Cut(-1, (vocabulary,)).ranges(group.rank(), ranks)
    if logits.shape[-1] != last - first:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit a vocabulary of {vocabulary}: rank {group.rank()} "
            f"of {ranks} holds {last - first}; pass the full size as vocabulary="
        )
    if is_real(logits) and not torch.compiler.is_compiling():
        about = (
            "shape of the targets", targets.shape, "size of the vocabulary", vocabulary,
            "type of the logits", logits.dtype, "label smoothing", label_smoothing,
        )  # fmt: skip
        agreed_group(group.group_name, "parallel_cross_entropy", None, about=about)
    ignored = targets == ignore_index
    require_range("target", targets.masked_fill(ignored, 0), vocabulary)
    losses = _ParallelCrossEntropy.apply(logits, targets, ignored, vocabulary, label_smoothing, group)
    if reduction == "none":
        return losses
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()
