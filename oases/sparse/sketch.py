"""The count sketch of the rows of a gradient, and what its error is corrected by.

A key is a row, a value the numbers of the row, so that one hash serves them all and no two numbers of a row collide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oases.kernels.sparse import sketch_decode, sketch_encode

GAUSSIAN_MEDIAN = {1: 1.0, 3: 0.4487, 5: 0.2868}
"""The variance of the median of so many normal numbers of variance 1."""


class Estimate(NamedTuple):
    """values: of the sum over ranks, [union, width]; own: what of this rank's values they stand for, if known."""

    values: Tensor
    own: Tensor | None


@dataclass(frozen=True)
class Sketch:
    """rows hash functions with `columns` cells each, of which each is a row of the gradient."""

    rows: int
    columns: int
    seed: int

    @classmethod
    def sized(cls, union: int, rows: int, cells_per_nonzero: float, seed: int) -> Sketch:
        """For `union` rows."""
        return cls(rows, max(1, round(cells_per_nonzero * union / rows)), seed)

    @property
    def cells(self) -> int:
        """Of all its rows."""
        return self.rows * self.columns

    def encode(self, union: Tensor, values: Tensor) -> Tensor:
        """Values [union, width] as a table float32 [rows, columns, width]."""
        return sketch_encode(union, values.float(), self.rows, self.columns, self.seed)

    def decode(self, table: Tensor, union: Tensor) -> Tensor:
        """The unbiased estimate: the median over the rows, [union, width]."""
        return sketch_decode(table, union, self.seed)

    def contract(self, table: Tensor, own: Tensor, union: Tensor) -> Estimate:
        """An estimate for error feedback, from the summed table and this rank's own.

        Feedback adds the error to the next step's gradient, so it must be smaller than what was to be sent, or it
        grows without bound; the unbiased estimate's is larger with less than a cell for a non-zero. With one row,
        dividing a cell among its keys makes the estimate an orthogonal projection: nothing is nearer in the span of
        the table. With several, the median is scaled by 1 / (1 + relative variance), which its error then is below.
        """
        if self.rows == 1:
            count = torch.ops.oases.sketch_encode(union, _ones(union), 1, self.columns, self.seed, False)
            share = 1 / self.decode(count, union).abs()
            return Estimate(self.decode(table, union) * share, self.decode(own, union) * share)
        variance = GAUSSIAN_MEDIAN[self.rows] * max(0, union.shape[0] - 1) / self.columns
        return Estimate(self.decode(table, union) / (1 + variance), None)


def _ones(union: Tensor) -> Tensor:
    return torch.ones(union.shape[0], 1, device=union.device)
