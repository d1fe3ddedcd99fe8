"""Kernels of quantised numbers: 8 bits each, and an fp32 scale per block of 128 (csrc/quantize_kernels.h).

Packed numbers are the codes of all blocks, then the blocks' scales. A block with a NaN or an infinity comes back as
NaN. CPU and CUDA give the same bytes. No function has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oases.extension import quantized_bytes


def quantize(x: Tensor, parts: Tensor | None = None) -> Tensor:
    """Pack x, or its sum with packed parts.

    x: contiguous float32 [n]. parts: uint8 [count, bytes]. Returns uint8 [`quantized_bytes(n)`]. Raises ValueError
    for other types and sizes.
    """
    packed = x.new_empty(quantized_bytes(x.numel()), dtype=torch.uint8)
    torch.ops.oases.quantize(x, parts, -1, packed)
    return packed


def dequantize(packed: Tensor, numel: int) -> Tensor:
    """Numbers float32 [numel] of what `quantize` packed. Raises ValueError for too few bytes."""
    out = packed.new_empty(numel, dtype=torch.float32)
    torch.ops.oases.dequantize(packed, out)
    return out


def dequantize_sum(x: Tensor, parts: Tensor) -> Tensor:
    """Sum, float32 as x, of x [n] and packed parts uint8 [count, bytes]. Raises ValueError for other sizes."""
    out = torch.empty_like(x)
    torch.ops.oases.dequantize_sum(x, parts, -1, out)
    return out
