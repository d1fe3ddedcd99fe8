"""Dropout whose masks are those of the unsplit model, however batch, sequence and features are cut."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.parallel.randomness import whole_batch_mask


class ParallelDropout(nn.Dropout):
    """`nn.Dropout` for blocks of an `OverlappedStack`: the same masks for every schedule, split and degree.

    shard_dim: the dimension of the input that is cut over the tensor-parallel ranks, such as 1 for attention
    weights [batch, heads, S, S]; each rank then uses its part of the whole mask. None: the input is whole.
    An `nn.Dropout` in a block becomes one of these by itself, with shard_dim unknown: in `partial` ranks then draw
    differently. Outside of a stack, in compiled code, under an activation checkpoint of the block's own, and where
    the first dimension does not hold the samples, it is `nn.Dropout`.
    """

    _cut_is_known = True

    def __init__(self, p: float = 0.5, inplace: bool = False, *, shard_dim: int | None = None) -> None:
        super().__init__(p, inplace)
        self.shard_dim = shard_dim

    @classmethod
    def adopt(cls, module: nn.Dropout) -> None:
        """Turn an `nn.Dropout` into one of these, in place."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.shard_dim, module._cut_is_known = None, False

    def forward(self, input: Tensor) -> Tensor:
        """[batch, ...] -> the same shape; kept values are scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return super().forward(input)
        cut: int | Literal["whole", "unknown"] = "whole" if self._cut_is_known else "unknown"
        if self.shard_dim is not None:
            cut = self.shard_dim
        return masked(input, self.p, cut, inplace=self.inplace)

    def extra_repr(self) -> str:
        """As `nn.Dropout`, and how the input is cut."""
        return f"{super().extra_repr()}, shard_dim={self.shard_dim}"


def masked(x: Tensor, p: float, cut: int | Literal["whole", "unknown"], *, inplace: bool = False) -> Tensor:
    """`F.dropout` with the mask of the uncut model where that can be had; `cut` as `whole_batch_mask` takes it."""
    mask = None
    if not torch.compiler.is_compiling() and not _checkpointed():
        mask = whole_batch_mask(x, 1 - p, cut)
    if mask is None:
        return F.dropout(x, p, inplace=inplace)
    scaled = mask.div_(1 - p) if p < 1 else mask
    return x.mul_(scaled) if inplace else x * scaled


def adopt_dropouts(blocks: nn.Module) -> None:
    """Make every plain `nn.Dropout` in `blocks` a ParallelDropout."""
    for module in blocks.modules():
        if type(module) is nn.Dropout:
            ParallelDropout.adopt(module)


def _checkpointed() -> bool:
    # A checkpoint runs its part again outside of the op's streams; the default generator it restores itself.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
