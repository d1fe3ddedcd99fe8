"""Bias + GELU and SwiGLU in one pass over memory each, forward and backward."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

import oases.extension  # noqa: F401  (defines the ops)

Approximate = Literal["tanh", "none"]


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "tanh") -> Tensor:
    """gelu(x + bias), as `torch.nn.functional.gelu(x + bias, approximate=approximate)`; "none" is exact (erf).

    x: [..., n]. bias: [n]. float32, float16 or bfloat16, of one dtype and device; arithmetic and sums are float32.
    Returns [..., n], contiguous. Raises RuntimeError for differing dtypes, devices or shapes.
    """
    return torch.ops.oases.bias_gelu(x, bias, approximate)


def swiglu(x: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(x) * up; without `up`, gate and up are the first and second half of the last dimension of x.

    x: [..., n] as up, or [..., 2 n]; float32, float16 or bfloat16; arithmetic is float32. Returns [..., n],
    contiguous. Raises RuntimeError for another dtype, an odd last dimension, or an up unlike x.
    """
    return torch.ops.oases.swiglu(x, up)


def _setup_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = torch.ops.oases.bias_gelu_backward(grad, x, bias, ctx.approximate)
    return grad_x, None if bias is None else grad_bias, None


def _setup_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x, up = ctx.saved_tensors
    grad_x, grad_up = torch.ops.oases.swiglu_backward(grad, x, up)
    return grad_x, None if up is None else grad_up


torch.library.register_autograd("oases::bias_gelu", _gelu_backward, setup_context=_setup_gelu)
torch.library.register_autograd("oases::swiglu", _swiglu_backward, setup_context=_setup_swiglu)
