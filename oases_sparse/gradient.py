"""Non-zero rows of a gradient, stored dense or as the sparse tensor of an embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from oases.kernels.sparse import bitmap_pack, bitmap_unpack

PACKED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Form(NamedTuple):
    """Form of a tensor's gradients. layout: None where no gradient has shown it."""

    shape: torch.Size
    dtype: torch.dtype
    layout: torch.layout | None

    @classmethod
    def of(cls, gradient: Tensor | None, like: Tensor | None) -> Form:
        """Form of a gradient, or of a missing one from `like`. ValueError for what cannot be reduced."""
        shown = like if gradient is None else gradient
        if shown is None:
            raise ValueError("no gradient: give like=, a parameter or gradient that has its shape")
        _require_reducible(shown)
        known = gradient is not None or shown.is_sparse  # a dense parameter may have sparse gradients
        return cls(shown.shape, shown.dtype, shown.layout if known else None)

    def zeros(self, device: torch.device | str, *, marked: bool = False) -> Tensor:
        """Gradient of zeros; marked: with NaN in its first number, see `is_marked`."""
        if self.layout == torch.sparse_coo:
            rows = min(int(marked), self.shape[0])
            values = torch.full((rows, *self.shape[1:]), torch.nan, dtype=self.dtype, device=device)
            ids = torch.zeros(1, rows, dtype=torch.int64, device=device)
            return torch.sparse_coo_tensor(ids, values, self.shape, check_invariants=False)
        whole = torch.zeros(self.shape, dtype=self.dtype, device=device)
        whole.view(-1)[: int(marked)] = torch.nan
        return whole


def is_marked(mean: Tensor) -> bool:
    """Whether the first number is NaN: of any layout, so that all ranks find the same."""
    first = mean.values()[:1][mean.indices()[0, :1] == 0] if mean.is_sparse else mean
    return bool(first.reshape(-1)[:1].isnan().any())


class Rows(ABC):
    """Gradient [rows, ...] with rows of `width` numbers; one without dimensions is a row of one number.

    Keys and values are this rank's rows: int64 [k], ascending, and [k, width].
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.rows = shape[0] if shape else 1
        self.width = shape[1:].numel()

    @abstractmethod
    def bits(self) -> Tensor:
        """Bitmap of this rank's rows, uint8 [ceil(rows / 8)]."""

    @abstractmethod
    def own(self) -> tuple[Tensor, Tensor]:
        """This rank's keys and values."""

    @abstractmethod
    def gather(self, union: Tensor) -> Tensor:
        """New values [union, width]: this rank's, zero where it has none. union includes all of this rank's keys."""

    @abstractmethod
    def dense(self) -> Tensor:
        """New dense tensor of the gradient, [rows, width], to be reduced."""

    @abstractmethod
    def put(self, union: Tensor, values: Tensor) -> Tensor:
        """Result with values [union, width] in their rows, zero elsewhere, stored as the gradient was."""

    @abstractmethod
    def put_dense(self, whole: Tensor) -> Tensor:
        """Result from a dense [rows, width]."""


class DenseRows(Rows):
    """Dense gradient; in_place: the result is written to it, and `dense` does not copy."""

    def __init__(self, gradient: Tensor, in_place: bool) -> None:
        super().__init__(gradient.shape, gradient.dtype, gradient.device)
        if in_place and not gradient.is_contiguous():
            raise ValueError(f"only contiguous gradients are reduced in place, got strides {gradient.stride()}")
        self._gradient = gradient
        self._matrix = gradient.contiguous().view(self.rows, self.width)
        self._in_place = in_place
        self._bits: Tensor | None = None

    def bits(self) -> Tensor:
        """See `Rows`."""
        if self._bits is None:
            self._bits = self._pack()
        return self._bits.clone()  # collectives write into it

    def _pack(self) -> Tensor:
        matrix = self._matrix
        if matrix.dtype not in PACKED_DTYPES:  # the kernel does not support float64
            matrix = (matrix != 0).any(1, keepdim=True).half()
        return bitmap_pack(matrix)

    def own(self) -> tuple[Tensor, Tensor]:
        """See `Rows`."""
        keys = bitmap_unpack(self.bits(), self.rows)
        return keys, self._matrix.index_select(0, keys)

    def gather(self, union: Tensor) -> Tensor:
        """See `Rows`."""
        return self._matrix.index_select(0, union)

    def dense(self) -> Tensor:
        """See `Rows`."""
        return self._matrix if self._in_place else self._matrix.clone()

    def put(self, union: Tensor, values: Tensor) -> Tensor:
        """See `Rows`."""
        # In place, the rows outside the union are zero already.
        whole = self._matrix if self._in_place else torch.zeros_like(self._matrix)
        whole.index_copy_(0, union, values)
        return self._gradient if self._in_place else whole.view(self.shape)

    def put_dense(self, whole: Tensor) -> Tensor:
        """See `Rows`."""
        return self._gradient if self._in_place else whole.view(self.shape)


class ListedRows(Rows):
    """Sparse COO gradient with one sparse dimension; listed rows count even if zero."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__(gradient.shape, gradient.dtype, gradient.device)
        gradient = gradient.coalesce()  # sums repeated ids
        self._keys = gradient.indices()[0]
        self._values = gradient.values().reshape(-1, self.width)

    def bits(self) -> Tensor:
        """See `Rows`."""
        bits = torch.zeros((self.rows + 7) // 8, dtype=torch.uint8, device=self.device)
        # Keys are unique, so a sum sets the bits of a byte.
        return bits.index_add_(0, self._keys >> 3, (1 << (self._keys & 7)).to(torch.uint8))

    def own(self) -> tuple[Tensor, Tensor]:
        """See `Rows`."""
        return self._keys, self._values

    def gather(self, union: Tensor) -> Tensor:
        """See `Rows`."""
        return pack_values(union, self._keys, self._values)

    def dense(self) -> Tensor:
        """See `Rows`."""
        whole = torch.zeros(self.rows, self.width, dtype=self.dtype, device=self.device)
        return whole.index_copy_(0, self._keys, self._values)

    def put(self, union: Tensor, values: Tensor) -> Tensor:
        """See `Rows`."""
        return torch.sparse_coo_tensor(
            union[None], values.view(-1, *self.shape[1:]), self.shape, is_coalesced=True, check_invariants=False
        )

    def put_dense(self, whole: Tensor) -> Tensor:
        """See `Rows`."""
        kept = bitmap_unpack(DenseRows(whole, in_place=False).bits(), self.rows)
        return self.put(kept, whole.index_select(0, kept))


def rows_of(gradient: Tensor, in_place: bool = False) -> Rows:
    """Rows of a gradient. ValueError for types and layouts that cannot be reduced."""
    _require_reducible(gradient)
    return ListedRows(gradient) if gradient.is_sparse else DenseRows(gradient, in_place)


def _require_reducible(gradient: Tensor) -> None:
    if not gradient.is_floating_point():
        raise ValueError(f"gradients must be of a float dtype, got {gradient.dtype}; convert it")
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"gradients must be dense or sparse COO, got {gradient.layout}; convert it")
    if gradient.is_sparse and gradient.sparse_dim() != 1:
        raise ValueError(
            f"sparse gradients must have 1 sparse dimension, the rows, got {gradient.sparse_dim()}; "
            "make it dense, or sparse by rows with .to_dense().to_sparse(1)"
        )


def pack_values(support: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Scatter one rank's values into the order of all keys, for a sum over the ranks.

    support: int64 [s], ascending; keys: int64 [m], all in support; values: [m, n]. Returns [s, n] of the dtype of
    values, zero where this rank has no value. Values of equal keys are summed, on CUDA in nondeterministic order;
    unique keys are deterministic. ValueError for a key that is not in support; the check makes a CUDA call wait for
    the device.
    """
    places = torch.searchsorted(support, keys)
    known = places < support.shape[0]
    if support.shape[0]:
        known &= support[places.clamp(max=support.shape[0] - 1)] == keys
    if not bool(known.all()):
        raise ValueError(f"key {int(keys[~known][0])} is not in the support")
    return values.new_zeros(support.shape[0], values.shape[1]).index_add_(0, places, values)
