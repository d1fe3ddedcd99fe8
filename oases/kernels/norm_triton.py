"""`bias_dropout_residual_norm` in Triton: the same masks and results as the kernels of csrc/norm.cu.

A row is one program's block, so rows are at most 65536 numbers long. Import it by name; it needs the package triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oases.kernels.norm import NormKind

MAX_ROW = 65536
# Programs of the backward, each of which sums its rows' share of the parameters' gradients.
MAX_PROGRAMS = 512


@triton.jit
def _drop(value, seed, row, columns, fours, threshold, scale):
    """csrc/philox.h for one row: column c takes word c % 4 of call c / 4."""
    counter = row.to(tl.uint64) * fours.to(tl.uint64) + (columns // 4).to(tl.uint64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0)
    which = columns % 4
    word = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    return tl.where(word.to(tl.uint64) < threshold.to(tl.uint64), value * scale, 0.0)


@triton.jit(do_not_specialize=["seed", "offset", "fours", "threshold"])
def _forward(
    y, x, bias, weight, norm_bias, out, h, mean, rstd, n, eps, seed, offset, fours, threshold, scale,
    HAS_BIAS: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, DROPOUT: tl.constexpr, LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < n
    start = row * n
    value = tl.load(y + start + columns, mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=here, other=0.0).to(tl.float32)
    if DROPOUT:
        value = _drop(value, seed, row + offset, columns, fours, threshold, scale)
    value += tl.load(x + start + columns, mask=here, other=0.0).to(tl.float32)
    stored = value.to(out.dtype.element_ty)
    tl.store(out + start + columns, stored, mask=here)
    value = stored.to(tl.float32)
    if LAYER:
        center = tl.sum(value, axis=0) / n
        tl.store(mean + row, center)
        value = tl.where(here, value - center, 0.0)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / n + eps)
    tl.store(rstd + row, inverse)
    normal = value * inverse * tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    if HAS_NORM_BIAS:
        normal += tl.load(norm_bias + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(h + start + columns, normal.to(h.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["seed", "offset", "fours", "threshold"])
def _backward(
    grad_out, grad_h, out, weight, mean, rstd, grad_y, grad_x, partials, rows, n, seed, offset, fours, threshold,
    scale, DROPOUT: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    here = columns < n
    scales = tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_norm_bias = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * n
        inverse = tl.load(rstd + row)
        normal = tl.load(out + start + columns, mask=here, other=0.0).to(tl.float32)
        if LAYER:
            normal = tl.where(here, normal - tl.load(mean + row), 0.0)
        normal *= inverse
        through = tl.load(grad_h + start + columns, mask=here, other=0.0).to(tl.float32)
        product = through * scales
        grad = product - normal * (tl.sum(product * normal, axis=0) / n)
        if LAYER:
            grad -= tl.sum(product, axis=0) / n
        grad = grad * inverse + tl.load(grad_out + start + columns, mask=here, other=0.0).to(tl.float32)
        tl.store(grad_x + start + columns, grad.to(grad_x.dtype.element_ty), mask=here)
        if DROPOUT:
            grad = _drop(grad, seed, tl.cast(row, tl.int64) + offset, columns, fours, threshold, scale)
            tl.store(grad_y + start + columns, grad.to(grad_y.dtype.element_ty), mask=here)
        of_weight += through * normal
        of_norm_bias += through
        of_bias += grad
    to = partials + tl.program_id(0).to(tl.int64) * 3 * n + columns
    tl.store(to, of_weight, mask=here)
    tl.store(to + n, of_norm_bias, mask=here)
    tl.store(to + 2 * n, of_bias, mask=here)


def _mask_of(p: float, seed: int, offset: int, n: int) -> tuple[int, int, int, int, float]:
    return seed, offset, (n + 3) // 4, round((1 - p) * 2**32), 1 / (1 - p) if p < 1 else 0.0


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, bias: Tensor | None, weight: Tensor, norm_bias: Tensor | None, p: float,
        seed: int, offset: int, kind: NormKind, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        n = x.shape[-1]
        y, x = y.contiguous(), x.contiguous()
        rows = x.numel() // max(n, 1)
        out, h = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        if rows:
            _forward[(rows,)](
                y, x, x if bias is None else bias, weight, x if norm_bias is None else norm_bias, out, h, mean, rstd,
                n, eps, *_mask_of(p, seed, offset, n), HAS_BIAS=bias is not None,
                HAS_NORM_BIAS=norm_bias is not None, DROPOUT=p > 0, LAYER=kind == "layer",
                BLOCK=triton.next_power_of_2(n),
            )  # fmt: skip
        ctx.save_for_backward(out, weight, mean, rstd)
        ctx.options = (bias is not None, norm_bias is not None, p, seed, offset, kind)
        return out, h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, weight, mean, rstd = ctx.saved_tensors
        has_bias, has_norm_bias, p, seed, offset, kind = ctx.options
        grad_out, grad_h = (grad.contiguous() for grad in grads)
        rows, n = rstd.numel(), out.shape[-1]
        programs = min(rows, MAX_PROGRAMS)
        grad_x = torch.empty_like(out)
        grad_y = torch.empty_like(out) if p > 0 else grad_x
        partials = torch.empty(programs, 3, n, dtype=torch.float32, device=out.device)
        if rows:
            _backward[(programs,)](
                grad_out, grad_h, out, weight, mean, rstd, grad_y, grad_x, partials, rows, n,
                *_mask_of(p, seed, offset, n), DROPOUT=p > 0, LAYER=kind == "layer", BLOCK=triton.next_power_of_2(n),
            )  # fmt: skip
        of_weight, of_norm_bias, of_bias = partials.sum(0).to(weight.dtype)
        return (
            grad_y, grad_x, of_bias if has_bias else None, of_weight, of_norm_bias if has_norm_bias else None,
            *[None] * 5,
        )  # fmt: skip


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
    """As `oases.kernels.bias_dropout_residual_norm`, whose shapes and masks these are; bias and weights contiguous.

    Raises ValueError for rows of more than 65536 numbers.
    """
    if x.shape[-1] > MAX_ROW:
        raise ValueError(f"rows of {x.shape[-1]} numbers are longer than the {MAX_ROW} of one Triton program")
    result: tuple[Tensor, Tensor] = _Function.apply(y, x, bias, weight, norm_bias, p, seed, offset, kind, eps)
    return result
