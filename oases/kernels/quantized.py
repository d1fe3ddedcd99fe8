"""Kernels of quantised numbers: 8 or 4 bits each, and an fp32 scale per block of 128 (csrc/quantize_kernels.h).

A wire is the name of a type, such as "int8" or "int4:rotated:stochastic" (`oases.core.dtypes`). Packed numbers are
the codes of all blocks, then the blocks' scales. A block with a NaN or an infinity comes back as NaN. CPU and CUDA
give the same bytes. No function has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oases.extension import quantized_bytes

_SEEDS = 2**63
"""Seeds, which an op takes as integers of 64 bits with a sign."""


def quantize(x: Tensor, wire: str, seed: int = 0, parts: Tensor | None = None) -> Tensor:
    """Pack x, or its sum with packed parts.

    x: contiguous float32 [n]. seed: of stochastic rounding. parts: uint8 [count, bytes]. Returns uint8
    [`quantized_bytes(n, wire)`]. Raises ValueError for other types and sizes.
    """
    packed = x.new_empty(quantized_bytes(x.numel(), wire), dtype=torch.uint8)
    torch.ops.oases.quantize(x, wire, seed % _SEEDS, parts, -1, 0, packed)
    return packed


def dequantize(packed: Tensor, numel: int, wire: str) -> Tensor:
    """Numbers float32 [numel] of what `quantize` packed. Raises ValueError for too few bytes."""
    out = packed.new_empty(numel, dtype=torch.float32)
    torch.ops.oases.dequantize(packed, wire, out)
    return out


def dequantize_sum(x: Tensor, parts: Tensor, wire: str) -> Tensor:
    """Sum, float32 as x, of x [n] and packed parts uint8 [count, bytes]. Raises ValueError for other sizes."""
    out = torch.empty_like(x)
    torch.ops.oases.dequantize_sum(x, parts, wire, -1, out)
    return out
