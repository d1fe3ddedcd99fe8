"""`bias_gelu` and `swiglu` in Triton: the same results as the kernels of csrc/activation.cu.

A program owns BLOCK columns and walks down its share of the rows. Import it by name; it needs the package triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oases.kernels.activation import Approximate

BLOCK = 1024
MAX_PROGRAMS = 2048


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    twice_phi = _tanh(0.7978845608 * (x + 0.044715 * x * x * x)) if TANH else tl.erf(x * 0.7071067812)
    return 0.5 * x * (1.0 + twice_phi)


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    near = tl.minimum(tl.maximum(x, -12.0), 12.0)
    if TANH:
        t = _tanh(0.7978845608 * (near + 0.044715 * near * near * near))
        inner = 0.7978845608 * (1.0 + 3.0 * 0.044715 * near * near)
        slope = 0.5 * (1.0 + t) + 0.5 * near * (1.0 - t * t) * inner
    else:
        slope = 0.5 * (1.0 + tl.erf(near * 0.7071067812)) + near * 0.3989422804 * tl.exp(-0.5 * near * near)
    return slope


@triton.jit
def _gelu_forward(x, bias, out, rows, n, HAS_BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < n
    added = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + columns, mask=here, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * n + columns
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) + added
        tl.store(out + at, _gelu(value, TANH).to(out.dtype.element_ty), mask=here)


@triton.jit
def _gelu_backward(
    grad, x, bias, grad_x, partials, rows, n, HAS_BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < n
    added = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + columns, mask=here, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * n + columns
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) + added
        value = tl.load(grad + at, mask=here, other=0.0).to(tl.float32) * _gelu_slope(value, TANH)
        tl.store(grad_x + at, value.to(grad_x.dtype.element_ty), mask=here)
        total += value
    if HAS_BIAS:
        tl.store(partials + tl.program_id(0).to(tl.int64) * n + columns, total, mask=here)


@triton.jit
def _swiglu_forward(x, out, rows, n, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < n
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * n
        gate = tl.load(x + 2 * at + columns, mask=here, other=0.0).to(tl.float32)
        up = tl.load(x + 2 * at + n + columns, mask=here, other=0.0).to(tl.float32)
        tl.store(out + at + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward(grad, x, grad_x, rows, n, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < n
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * n
        gate = tl.load(x + 2 * at + columns, mask=here, other=0.0).to(tl.float32)
        up = tl.load(x + 2 * at + n + columns, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + at + columns, mask=here, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        of_gate = g * up * s * (1.0 + gate * (1.0 - s))
        tl.store(grad_x + 2 * at + columns, of_gate.to(grad_x.dtype.element_ty), mask=here)
        tl.store(grad_x + 2 * at + n + columns, (g * gate * s).to(grad_x.dtype.element_ty), mask=here)


def _grid(rows: int, n: int) -> tuple[int, int]:
    across = triton.cdiv(n, BLOCK)
    return max(1, min(rows, MAX_PROGRAMS // across)), across


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: Approximate) -> Tensor:
        x = x.contiguous()
        n = x.shape[-1]
        rows = x.numel() // max(n, 1)
        out = torch.empty_like(x)
        if rows:
            _gelu_forward[_grid(rows, n)](
                x, x if bias is None else bias, out, rows, n, HAS_BIAS=bias is not None, TANH=approximate == "tanh",
                BLOCK=BLOCK,
            )  # fmt: skip
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        n = x.shape[-1]
        rows = x.numel() // max(n, 1)
        grid = _grid(rows, n) if rows else (0, 0)
        partials = torch.empty(grid[0], n, dtype=torch.float32, device=x.device)
        if rows:
            _gelu_backward[grid](
                grads[0].contiguous(), x, x if bias is None else bias, grad_x, partials, rows, n,
                HAS_BIAS=bias is not None, TANH=ctx.approximate == "tanh", BLOCK=BLOCK,
            )  # fmt: skip
        return grad_x, None if bias is None else partials.sum(0).to(bias.dtype), None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        n = x.shape[-1] // 2
        rows = x.numel() // max(2 * n, 1)
        out = x.new_empty(*x.shape[:-1], n)
        if rows:
            _swiglu_forward[_grid(rows, n)](x, out, rows, n, BLOCK=BLOCK)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        n = x.shape[-1] // 2
        rows = x.numel() // max(2 * n, 1)
        if rows:
            _swiglu_backward[_grid(rows, n)](grads[0].contiguous(), x, grad_x, rows, n, BLOCK=BLOCK)
        return grad_x


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "tanh") -> Tensor:
    """As `oases.kernels.bias_gelu`: gelu(x + bias), x [..., n], bias [n] and contiguous, result [..., n]."""
    result: Tensor = _BiasGelu.apply(x, bias, approximate)
    return result


def swiglu(x: Tensor) -> Tensor:
    """As `oases.kernels.swiglu`: silu(gate) * up, x [..., 2 n], result [..., n]."""
    result: Tensor = _Swiglu.apply(x)
    return result
