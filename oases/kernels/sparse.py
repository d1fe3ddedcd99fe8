"""Kernels for sparse gradients: bitmaps of nonzero rows, and count sketches of their values.

In a bitmap, row r is bit r % 8 of byte r // 8, lowest bit first. A sketch is a small table that can be summed over
ranks. Each of its few rows hashes a key to one cell and adds the value there with a sign; the median over the rows
estimates the value. Hashes are computed from seed and row when needed, so that no table grows with the number of
parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

import oases.extension  # noqa: F401  (registers the ops)


def bitmap_pack(x: Tensor) -> Tensor:
    """Mark the rows that are not all zeros.

    x: float32, float16 or bfloat16 [rows, n]. NaN, infinities and denormals are nonzero, -0 is zero. Returns uint8
    [ceil(rows / 8)] with zeros past the last row. Raises RuntimeError for other shapes and dtypes.
    """
    return torch.ops.oases.bitmap_pack(x)


def bitmap_unpack(bits: Tensor, rows: int) -> Tensor:
    """List the marked rows.

    bits: uint8 [ceil(rows / 8)]; bits past the last row are ignored. Returns int64, ascending; a CUDA call
    synchronises to get their number. Raises RuntimeError for other shapes and dtypes.
    """
    return torch.ops.oases.bitmap_unpack(bits, rows)


def _bitmap_unpack_fake(bits: Tensor, rows: int) -> Tensor:
    return bits.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


torch.library.register_fake("oases::bitmap_unpack", _bitmap_unpack_fake)


def sketch_encode(keys: Tensor, values: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    """Add the values of all keys to a new sketch.

    keys: int64 [m], any numbers, e.g. positions in a gradient or, with n > 1, its rows; duplicates are allowed.
    values: float32 [m, n]. rows: 1, 3 or 5. Returns float32 [rows, columns, n], bitwise reproducible on CPU and
    CUDA: a cell sums its values in the order of the keys. (On CUDA this takes a sort of rows * m cells; there are
    no float atomics.) Raises RuntimeError for other shapes, dtypes and rows.
    """
    return torch.ops.oases.sketch_encode(keys, values, rows, columns, seed, True)


def sketch_decode(table: Tensor, keys: Tensor, seed: int) -> Tensor:
    """Estimate the sums of the values of keys.

    table: float32 [rows, columns, n] of `sketch_encode` with the same seed, or a sum of such tables; keys: int64
    [m]. Returns float32 [m, n], the median over the rows; NaN if one of the rows has NaN. Raises RuntimeError as
    `sketch_encode` does.
    """
    return torch.ops.oases.sketch_decode(table, keys, seed)
