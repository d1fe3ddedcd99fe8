"""Fused kernels for what lies between the products, on CUDA and on the CPU, each a differentiable torch.library op.

The work is done by `csrc/*.cu` and `csrc/*_cpu.cpp`, which compute the same. Imported by their module's name are the
kernels on tables and index lists: `permute` (rows to experts and back), `sparse` (sketches and bitmaps of gradients).
A function that makes the host wait for the device says so; the others do not.
"""

from oases.kernels.activation import bias_gelu, swiglu
from oases.kernels.norm import bias_dropout_residual_norm

__all__ = ["bias_dropout_residual_norm", "bias_gelu", "swiglu"]
