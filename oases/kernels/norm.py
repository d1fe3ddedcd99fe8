"""The epilogue after an all-reduce in one pass over memory: bias, dropout, residual and norm.

Unfused, the reduced sum is read and written once per step. Here forward reads y and x and writes out and h; backward
reads the gradients and out. Masks are not stored: Philox4x32-10 of (seed, row, column) computes them again.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

import oases._C  # noqa: F401  (defines the ops)

NormKind = Literal["layer", "rms"]


def bias_dropout_residual_norm(
    y: Tensor,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    kind: NormKind = "layer",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """out = x + dropout(y + bias); h = norm(out) * weight + norm_bias, a layer norm or an RMS norm. Returns (out, h).

    y: [..., n], the reduced sum. x: [..., n], the residual. bias, weight, norm_bias: [n]. All float32, float16 or
    bfloat16, of one dtype and device; arithmetic and sums are float32. out and h: [..., n], contiguous.
    p: probability of zeroing a number of y + bias; what is kept is scaled by 1 / (1 - p).
    seed, offset: the mask of row r (all leading dimensions counted as one) is that of row offset + r under this seed,
    so the parts of a batch that somebody cut draw the masks of the whole. A seed is for one call on one batch.
    Raises RuntimeError, naming the value, where dtypes, devices or shapes differ, p is outside [0, 1], or kind is
    neither "layer" nor "rms".
    """
    out, h, _, _ = torch.ops.oases.bias_dropout_residual_norm(
        y, x, bias, weight, norm_bias, p, seed, offset, kind, eps
    )
    return out, h


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, bias, weight, norm_bias, p, seed, offset, kind, _ = inputs
    out, _, mean, rstd = output
    # Most callers use both results; where one is not used its gradient is no tensor of zeros to be read.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(out, weight, mean, rstd)
    ctx.options = (bias is not None, norm_bias is not None, p, seed, offset, kind)


def _backward(ctx: Any, grad_out: Tensor | None, grad_h: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    has_bias, has_norm_bias, p, *_ = ctx.options
    grad_y, grad_x, grad_bias, grad_weight, grad_norm_bias = torch.ops.oases.bias_dropout_residual_norm_backward(
        grad_out, grad_h, *ctx.saved_tensors, *ctx.options
    )
    return (
        grad_y if p > 0 else grad_x,
        grad_x,
        grad_bias if has_bias else None,
        grad_weight,
        grad_norm_bias if has_norm_bias else None,
        *[None] * 5,
    )


torch.library.register_autograd("oases::bias_dropout_residual_norm", _backward, setup_context=_setup)
