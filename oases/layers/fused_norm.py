"""Pre-norm blocks, whose bias and residual run with the norm of the block above as one op.

Unfused, three ops read and write the sum after an all-reduce, and two pieces of the autograd graph record them. As
one op they need no graph: its backward op is called with the gradients of both results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oases.extension import Leaves, build_info

FUSED_ON = {"cuda"} if build_info()["cuda"] else set()
"""Types of devices on which the op is used. Not "cpu", where it takes two to three times as long as torch's ops."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_Op = torch.ops.oases


class PreNormBlock(nn.Module, ABC):
    """Base of blocks that compute x + (product(norm(x)) + bias), with the bias of their row-parallel linear.

    Subclasses set `norm`, and implement `product` and `row`. Where two of them follow each other, a stack runs
    `combine` of the first and `prepare` of the second as one op. A subclass that overrides one of these or `partial`
    has its methods called instead.
    """

    norm: nn.LayerNorm

    @property
    @abstractmethod
    def row(self) -> Any:
        """Row-parallel linear at the end of `product`, which has a bias."""

    def prepare(self, x_BSH: Tensor) -> Tensor:
        """Norm, which may run on a shard of the sequence."""
        return self.norm(x_BSH)

    @abstractmethod
    def product(self, h_BSH: Tensor) -> Tensor:
        """[B, S, H] -> this rank's partial sum of the row-parallel linear, [B, S, H]."""

    def partial(self, x_BSH: Tensor) -> Tensor:
        """Norm and matmuls, up to the partial sum."""
        return self.product(self.prepare(x_BSH))

    def combine(self, x_BSH: Tensor, y_BSH: Tensor) -> Tensor:
        """Bias and residual, after the all-reduce."""
        return x_BSH + (y_BSH + self.row.bias)

    def joined_with(self, below: nn.Module, device: str) -> JoinedNorm | None:
        """`combine` of the block below and this block's norm as one op, on devices of this type; None for two.

        A stack asks for it, and runs it where it `takes` the tensors.
        """
        if device in FUSED_ON and isinstance(below, PreNormBlock) and _is_plain(below) and _is_plain(self):
            return JoinedNorm(below, self)
        return None


def _is_plain(block: PreNormBlock) -> bool:
    """Whether a block is a PreNormBlock by these very methods."""
    return all(
        getattr(getattr(block, name), "__func__", None) is getattr(PreNormBlock, name)
        for name in ("prepare", "partial", "combine")
    )


class JoinedNorm:
    """`combine` of a block and the norm of the block above it."""

    def __init__(self, below: PreNormBlock, above: PreNormBlock) -> None:
        self._below, self._above = below, above

    def takes(self, x: Tensor, y: Tensor) -> bool:
        """Whether the op computes what the two methods would.

        That is a LayerNorm with a weight and without hooks, tensors of one type that kernels take, no autocast, and
        no hooks on saved tensors.
        """
        norm = self._above.norm
        if type(norm) is not nn.LayerNorm or norm.weight is None or norm.normalized_shape != x.shape[-1:]:
            return False
        hooks = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
        if hooks or "forward" in vars(norm) or nn.modules.module._has_any_global_hook():
            return False
        given = (y, self._below.row.bias, norm.weight, x if norm.bias is None else norm.bias)
        return (
            x.dtype in _DTYPES
            and all(tensor.dtype is x.dtype and tensor.device == x.device for tensor in given)
            and not torch.is_autocast_enabled(x.device.type)
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        )

    def run(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """(x, reduced y) -> output of the block below, its norm, and what `piece` keeps; without a graph."""
        norm, bias = self._above.norm, self._below.row.bias
        with torch._C._AutoDispatchBelowAutograd():
            out, h, mean, rstd = _Op.bias_dropout_residual_norm.default(
                y, x, bias, norm.weight, norm.bias, 0.0, 0, 0, "layer", norm.eps
            )
        return out, h, (out, mean, rstd, (bias, norm.weight, norm.bias))

    def piece(self, kept: tuple[Any, ...], leaves: Sequence[Leaves], *, whole: bool) -> JoinedPiece:
        """Backward pass of `run`. leaves: of the two blocks. whole: as of `Piece`."""
        return JoinedPiece(kept, leaves, whole=whole)


class JoinedPiece:
    """Backward pass of a JoinedNorm, in place of the pieces of its two methods."""

    def __init__(self, kept: tuple[Any, ...], leaves: Sequence[Leaves], *, whole: bool) -> None:
        self._out, self._mean, self._rstd, self._parameters = kept
        self._version = self._out._version
        self._leaves, self._whole = leaves, whole

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of (output, norm) -> those of (x, y), which are equal. RuntimeError for a changed output."""
        if self._out._version != self._version:
            raise RuntimeError(
                "the output of a block was changed in place after the next block's norm had read it; change a copy"
            )
        bias, weight, norm_bias = self._parameters
        with torch._C._AutoDispatchBelowAutograd():
            _, grad_x, of_bias, of_weight, of_norm_bias = _Op.bias_dropout_residual_norm_backward.default(
                *gradients, self._out, weight, self._mean, self._rstd, True, norm_bias is not None, 0.0, 0, 0, "layer"
            )
        below, above = self._leaves
        for leaves, stand_in, gradient in (
            (below, bias, of_bias), (above, weight, of_weight), (above, norm_bias, of_norm_bias),
        ):  # fmt: skip
            if stand_in is not None and stand_in.requires_grad:
                leaves.add(stand_in, gradient, self._whole)
        return [grad_x, grad_x]
