"""Dropout with the masks of the unsharded model, for every split of batch, sequence and features."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.blocks.block_list import preparations
from oases.core.blocks.randomness import drawing, hash_of


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
    # A checkpoint recomputes outside of the op's streams and restores the default generator by itself.
    if not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        mask = whole_batch_mask(x, 1 - p, cut)
    if mask is None:
        return F.dropout(x, p, inplace=inplace)
    scaled = mask.div_(1 - p) if p < 1 else mask
    return x.mul_(scaled) if inplace else x * scaled


def adopt_dropouts(blocks: nn.Module) -> None:
    """Convert every plain `nn.Dropout` in `blocks`."""
    for module in blocks.modules():
        if type(module) is nn.Dropout:
            module.__class__ = ParallelDropout
            assert isinstance(module, ParallelDropout)
            module.shard_dim, module._cut_is_known = None, False


preparations.append(adopt_dropouts)


def whole_batch_mask(x: Tensor, keep: float, cut: int | Literal["whole", "unknown"]) -> Tensor | None:
    """The next dropout mask of the running op: ones with probability `keep`, else zeros, of the shape of `x`.

    Every sample has a stream, by its number in the whole batch. cut: dimension of `x` sharded over the
    tensor-parallel ranks; "whole" for none; "unknown": ranks draw different masks, unless the op's tensors are
    replicated. None where masks by sample are not available: outside of a stack, or where dimension 0 of `x` is not
    the batch.
    """
    draws = drawing.get()
    if draws is None or x.dim() == 0 or x.shape[0] == 0 or x.shape[0] % draws.extent.samples:
        return None
    extent = draws.extent
    per_sample = x.shape[0] // extent.samples
    shape = [per_sample, *x.shape[1:]]  # [1, tokens, ...] where the samples are dimension 0 themselves
    windows: list[tuple[int, int]] = []  # (dimension, first index) of this part in the mask of the whole batch
    if extent.of_tokens and per_sample == 1 and x.dim() > 1:
        windows.append((1, extent.first_token))
        shape[1] = extent.of_tokens
    if isinstance(cut, int):
        dim = cut % x.dim()
        windows.append((dim, draws.rank * shape[dim]))
        shape[dim] *= draws.size
    own = "" if draws.shared or cut != "unknown" else f" rank {draws.rank}"
    key = f"{draws.key} mask {draws.count}{own}"
    draws.count += 1
    generator = torch.Generator(x.device)
    parts = []
    for sample in range(extent.first_sample, extent.first_sample + extent.samples):
        generator.manual_seed(hash_of(f"{key} sample {sample}"))
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(keep, generator=generator)
        for dim, first in windows:
            mask = mask.narrow(dim, first, x.shape[dim])
        parts.append(mask)
    return torch.cat(parts)
