"""Fused kernels for what lies between the products, on CUDA and on the CPU, each a differentiable torch.library op.

The work is done by `csrc/*.cu` and `csrc/*_cpu.cpp`, which compute the same; the modules `*_triton` hold the same
kernels in Triton, for devices and experiments, and are imported only by name. So are the kernels on tables and index
lists: `permute` (rows to experts and back), `sketch` and `bitmap` (sparse gradients). A function that makes the host
wait for the device says so; the others do not.
"""

from oases.kernels.activation import bias_gelu, swiglu
from oases.kernels.norm import bias_dropout_residual_norm

__all__ = ["bias_dropout_residual_norm", "bias_gelu", "swiglu"]
