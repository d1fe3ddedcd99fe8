"""Count sketch of the rows of a gradient, with an error correction for error feedback.

A key is a row and its value the row's numbers, so one hash serves them all and no two numbers of a row collide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oases.kernels.sparse import sketch_decode, sketch_encode

GAUSSIAN_MEDIAN = {1: 1.0, 3: 0.4487, 5: 0.2868}
"""Variance of the median of 1, 3 or 5 standard normal numbers."""


class Estimate(NamedTuple):
    """values: of the sum over ranks, [union, width]; own: the part of this rank's values in them, if known."""

    values: Tensor
    own: Tensor | None


@dataclass(frozen=True)
class Sketch:
    """`rows` hash functions with `columns` cells each; a cell is a row of the gradient."""

    rows: int
    columns: int
    seed: int

    @classmethod
    def sized(cls, union: int, rows: int, cells_per_nonzero: float, seed: int) -> Sketch:
        """Sketch for `union` rows."""
        return cls(rows, max(1, round(cells_per_nonzero * union / rows)), seed)

    @property
    def cells(self) -> int:
        """Number of cells of all hash functions."""
        return self.rows * self.columns

    def encode(self, union: Tensor, values: Tensor) -> Tensor:
        """Values [union, width] -> table, float32 [rows, columns, width]."""
        return sketch_encode(union, values.float(), self.rows, self.columns, self.seed)

    def decode(self, table: Tensor, union: Tensor) -> Tensor:
        """Unbiased estimate: median over the rows, [union, width]."""
        return sketch_decode(table, union, self.seed)

    def contract(self, table: Tensor, own: Tensor, union: Tensor) -> Estimate:
        """Contractive estimate for error feedback, from the summed table and this rank's own.

        Feedback adds the error to the next step's gradient, so the error must be smaller than the signal, or it grows
        without bound; that of the unbiased estimate is larger with less than one cell per non-zero. With one row,
        dividing a cell among its keys makes the estimate an orthogonal projection, the closest in the span of the
        table. With several, the median is scaled by 1 / (1 + relative variance), which bounds its error.
        """
        if self.rows == 1:
            count = torch.ops.oases.sketch_encode(union, _ones(union), 1, self.columns, self.seed, False)
            share = 1 / self.decode(count, union).abs()
            return Estimate(self.decode(table, union) * share, self.decode(own, union) * share)
        variance = GAUSSIAN_MEDIAN[self.rows] * max(0, union.shape[0] - 1) / self.columns
        return Estimate(self.decode(table, union) / (1 + variance), None)


def _ones(union: Tensor) -> Tensor:
    return torch.ones(union.shape[0], 1, device=union.device)
