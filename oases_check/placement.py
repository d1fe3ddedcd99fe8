"""Where a rank's tensor lies in the unsharded one: found by its values, whatever the library that sharded it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Part of an unsharded tensor. dim: along which it is cut, None for all of it. index: its rows along dim."""

    dim: int | None = None
    index: tuple[int, ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        """This part of an unsharded tensor."""
        return whole if self.dim is None else whole.index_select(self.dim, torch.tensor(self.index))


def part_of(whole: Tensor, mine: Tensor) -> Part | None:
    """The part that has these values; None where there is none. whole: its rows differ, see `made_distinct`."""
    if mine.shape == whole.shape:
        return Part()
    cut = [dim for dim, (a, b) in enumerate(zip(whole.shape, mine.shape, strict=False)) if a != b]
    if whole.dim() != mine.dim() or len(cut) != 1:
        return None
    (dim,) = cut
    places = {row: place for place, row in enumerate(_rows(whole, dim))}
    found = [places.get(row) for row in _rows(mine, dim)]
    return None if None in found else Part(dim, tuple(place for place in found if place is not None))


def _rows(tensor: Tensor, dim: int) -> list[bytes]:
    flat = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).contiguous()
    return [row.numpy().tobytes() for row in flat.view(torch.uint8).reshape(len(flat), -1)] if flat.numel() else []
