"""Fused bias, dropout, residual and norm after an all-reduce, in one pass over memory.

Unfused, the reduced sum is read and written once per op. Here forward reads y and x and writes out and h; backward
reads the gradients and out. Masks are not stored: Philox4x32-10 of (seed, row, column) recomputes them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

import oases.extension  # noqa: F401  (defines the ops)

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
    """out = x + dropout(y + bias); h = norm(out) * weight + norm_bias, with LayerNorm or RMSNorm. Returns (out, h).

    y: [..., n], the reduced sum. x: [..., n], the residual. bias, weight, norm_bias: [n]. All float32, float16 or
    bfloat16, of one dtype and device; arithmetic and sums are float32. out and h: [..., n], contiguous. p: dropout
    probability. seed, offset: row r (leading dimensions flattened) has the mask of row offset + r under this seed,
    so sub-batches draw the masks of the whole batch. Use a seed for one call on one batch only. Raises RuntimeError
    for differing dtypes, devices or shapes, p outside [0, 1], or a kind other than "layer" and "rms".
    """
    out, h, _, _ = torch.ops.oases.bias_dropout_residual_norm(
        y, x, bias, weight, norm_bias, p, seed, offset, kind, eps
    )
    return out, h


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, bias, weight, norm_bias, p, seed, offset, kind, _ = inputs
    out, _, mean, rstd = output
    # Most callers use both results; an unused one gets no zero gradient tensor that would have to be read.
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
