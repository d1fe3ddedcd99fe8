"""Kernels on sparse gradients: bitmaps of the rows that are not zero, and count sketches of their values.

Of a bitmap, row r is bit r % 8 of byte r // 8, the lowest bit first. A sketch is a small table that can be summed
over the ranks. Each of a few rows of the table hashes a key to one cell and adds the value there with a sign; the
median over the rows is an estimate of the value. Hashes are computed from seed and row as they are needed, so that no
table grows with the number of parameters.
"""

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


def sketch_encode(keys: Tensor, values: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    """Add the values of all keys to a new table.

    keys: int64 [m], any numbers, such as the positions in a gradient or, with n > 1, the numbers of its rows; a key
    may come more than once. values: float32 [m, n]. rows: 1, 3 or 5. Returns float32 [rows, columns, n]. The same on
    every run, on CPU and on CUDA, bit by bit: a cell adds up its values in the order of the keys. (On CUDA that takes
    a sort of rows * m cells; there are no float atomics.) RuntimeError for other shapes, dtypes and rows.
    """
    return torch.ops.oases.sketch_encode(keys, values, rows, columns, seed, True)


def sketch_decode(table: Tensor, keys: Tensor, seed: int) -> Tensor:
    """Estimate the sums of the values of keys.

    table: float32 [rows, columns, n] of `sketch_encode` with the same seed, or a sum of such tables; keys: int64 [m].
    Returns float32 [m, n], the median over the rows; NaN where one of the rows has NaN. RuntimeError as above.
    """
    return torch.ops.oases.sketch_decode(table, keys, seed)
