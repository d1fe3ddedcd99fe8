"""Which rows of a gradient are not zero, one bit each: row r is bit r % 8 of byte r // 8, the lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor

import oases._C  # noqa: F401  (registers the ops)


def bitmap_pack(x: Tensor) -> Tensor:
    """Mark the rows that hold anything but zeros.

    x: float32, float16 or bfloat16 [rows, n]. NaN, infinities and denormals are not zero, -0 is. Returns uint8
    [ceil(rows / 8)], the bits past the last row zero. RuntimeError for other shapes and dtypes.
    """
    return torch.ops.oases.bitmap_pack(x)


def bitmap_unpack(bits: Tensor, rows: int) -> Tensor:
    """List the rows that are marked.

    bits: uint8 [ceil(rows / 8)]; those past the last row do not count. Returns int64, ascending; a CUDA call waits
    for the device to know how many. RuntimeError for other shapes and dtypes.
    """
    return torch.ops.oases.bitmap_unpack(bits, rows)


def _bitmap_unpack_fake(bits: Tensor, rows: int) -> Tensor:
    return bits.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


torch.library.register_fake("oases::bitmap_unpack", _bitmap_unpack_fake)
