"""Dropout with the masks of the unsharded model, for every split of batch, sequence and features."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.blocks.randomness import whole_batch_mask


class ParallelDropout(nn.Dropout):
    """`nn.Dropout` for blocks of an `OverlappedStack`: the same masks for every schedule, split and degree.

    shard_dim: input dimension sharded over the tensor-parallel ranks, such as 1 for attention weights [batch, heads,
    S, S]; each rank then uses its part of the full mask. None: the input is replicated. An `nn.Dropout` in a block is
    converted automatically, with unknown shard_dim: in `partial` ranks then draw different masks. Outside of a stack,
    in compiled code, under an activation checkpoint inside the block, and where the first dimension is not the batch,
    it is `nn.Dropout`.
    """

    _cut_is_known = True

    def __init__(self, p: float = 0.5, inplace: bool = False, *, shard_dim: int | None = None) -> None:
        super().__init__(p, inplace)
        self.shard_dim = shard_dim

    @classmethod
    def adopt(cls, module: nn.Dropout) -> None:
        """Convert an `nn.Dropout` in place."""
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
        """Representation of `nn.Dropout`, and the sharded dimension."""
        return f"{super().extra_repr()}, shard_dim={self.shard_dim}"


def masked(x: Tensor, p: float, cut: int | Literal["whole", "unknown"], *, inplace: bool = False) -> Tensor:
    """`F.dropout` with the mask of the unsharded model where it is available; cut: see `whole_batch_mask`."""
    mask = None
    if not torch.compiler.is_compiling() and not _checkpointed():
        mask = whole_batch_mask(x, 1 - p, cut)
    if mask is None:
        return F.dropout(x, p, inplace=inplace)
    scaled = mask.div_(1 - p) if p < 1 else mask
    return x.mul_(scaled) if inplace else x * scaled


def adopt_dropouts(blocks: nn.Module) -> None:
    """Convert every plain `nn.Dropout` in `blocks`."""
    for module in blocks.modules():
        if type(module) is nn.Dropout:
            ParallelDropout.adopt(module)


def _checkpointed() -> bool:
    # A checkpoint recomputes outside of the op's streams and restores the default generator by itself.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
