"""Rows in a table that adds up over the ranks, and out of it exactly, by peeling with a support that is known.

All ranks know the union of their rows from the bitmap. Which cell gives which row away follows from the rows alone:
the table carries values only, and every rank finds out by itself, and alike, whether it peels.
"""

from __future__ import annotations

from torch import Tensor

from oases.kernels.peel import PeelTable, cells_for, peel_decode, peel_encode, peel_sums

FAILURE = 0.01
"""How often a table that holds as many rows as it was made for may fail to peel: then it is sent packed."""
MARGIN = 1.1
"""How many more rows than in the last step a table is made for."""


def table_cells(union: int) -> int:
    """Cells for that many rows; from a few thousand rows on, 1.3 for each."""
    return cells_for(union, FAILURE)


def encode(keys: Tensor, values: Tensor, cells: int, seed: int) -> Tensor:
    """This rank's rows as a table float32 [cells, width]."""
    return peel_sums(keys, values.float(), cells, seed)


def decode(sums: Tensor, union: Tensor, seed: int) -> Tensor | None:
    """The sums of the rows, [union, width], from the summed table; None where the rows do not peel."""
    header = peel_encode(union, None, sums.shape[0], seed).header
    peeled = peel_decode(PeelTable(header, sums), seed)
    return peeled.values if peeled.success else None
