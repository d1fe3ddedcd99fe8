"""Fused kernels for the ops between matmuls, on CUDA and CPU, each a differentiable torch.library op.

Implemented in `csrc/*.cu` and `csrc/*_cpu.cpp`, which compute the same. The modules `permute` (rows to experts and
back), `sparse` (sketches and bitmaps of gradients) and `quantized` (blocks of 8 or 4 bits, without gradients) are
imported by name. Functions that synchronise with the device say so; the others do not.
"""

from oases.kernels.activation import bias_gelu, swiglu
from oases.kernels.norm import bias_dropout_residual_norm

__all__ = ["bias_dropout_residual_norm", "bias_gelu", "swiglu"]
