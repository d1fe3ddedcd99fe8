"""Sparse gradients in a small table that can be summed over the ranks and from which they come out exactly.

Each key lies in three cells. A cell that holds one key alone, however often, gives it away; taken out of its other
two cells, it may leave another key alone, and so on: the table peels. That it does all the way is very likely with
`cells_for(keys)` cells. All ranks find the same keys and values, bit by bit, in the same summed table.

There are two ways to the values. `peel_encode(keys, values, ...)` sends their sums along, in one exchange: a value
is then the sum of its cell less the values of the cell's other keys. Its error is that of the cell's sum, at most
2^-24 times its largest partial sum for each term, plus the errors of those others: small values beside large ones
lose their precision, and NaN or infinity spreads. Or peel the keys alone, then sum `pack_values(support, ...)` over
the ranks: a second exchange, and exactly the dense sums.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import oases._C  # noqa: F401  (registers the ops)


class PeelTable(NamedTuple):
    """What ranks add up: header int64 [cells, 3], by a sum that wraps around, and sums float32 [cells, n] or None."""

    header: Tensor
    sums: Tensor | None


class Peeled(NamedTuple):
    """Keys int64 [s] in ascending order, each once; values float32 [s, n], or None where the table had no sums.

    Where success is False the table held too many keys; keys and values are empty then.
    """

    keys: Tensor
    values: Tensor | None
    success: bool


def cells_for(keys: int, failure: float = 1e-3) -> int:
    """Cells for up to `keys` different keys, a multiple of 3, that fail to peel with about the given probability.

    From a few thousand keys on, 1.3 cells a key; fewer keys need more, because two keys may share all their three
    cells. ValueError for a negative number of keys or a probability that is not in (0, 1).
    """
    if keys < 0 or not 0 < failure < 1:
        raise ValueError(f"keys must be at least 0 and failure in (0, 1), got {keys} and {failure}")
    # Of keys^2 / 2 pairs, one in columns^3 shares its cells. Below 1.23 cells a key almost no table peels.
    pairs = math.ceil((keys * keys / (2 * failure)) ** (1 / 3))
    return 3 * max(math.ceil(1.3 / 3 * keys) + 8, pairs)


def peel_encode(keys: Tensor, values: Tensor | None, cells: int, seed: int) -> PeelTable:
    """Put keys, and what belongs to them, into a new table.

    keys: int64 [m], from 0 to 2^48 - 1; a key may come more than once, on one rank and on several, up to 2^15 times
    in all. values: float32 [m, n] or None. cells: a multiple of 3, the same on every rank, such as `cells_for`.
    Deterministic on CPU and on CUDA (as `sketch_encode`). RuntimeError for a key out of range, which it names (a
    CUDA call waits for the device to know), and for other shapes and dtypes.
    """
    header = torch.ops.oases.peel_encode(keys, cells, seed)
    if values is None:
        return PeelTable(header, None)
    return PeelTable(header, peel_sums(keys, values, cells, seed))


def peel_sums(keys: Tensor, values: Tensor, cells: int, seed: int) -> Tensor:
    """The sums of `peel_encode` alone, float32 [cells, n]: for ranks that know the keys of all by other means."""
    # They are a sketch of three rows whose signs are all positive.
    sums = torch.ops.oases.sketch_encode(keys, values, 3, cells // 3, seed, False)
    return sums.view(cells, values.shape[1])


def peel_decode(table: PeelTable, seed: int) -> Peeled:
    """Take all keys out of a table, or out of the sum of the tables of several ranks.

    A cell passes for one with a single key if its count divides its keys, the quotient hashes to that very cell and
    the sum of the checks is count times the check of the quotient. For a cell with several keys that has a
    probability of about 2^-64 / (cells / 3) each time it is looked at, for keys that were not chosen to break the
    hash; and a wrong key would have to leave the whole table at zero to go unnoticed. A CUDA call waits for the
    device, several times. RuntimeError for other shapes and dtypes.
    """
    keys, owners, rounds, complete = torch.ops.oases.peel_keys(table.header, seed)
    success = bool(complete)
    if not success:
        keys, owners, rounds = keys[:0], owners[:0], rounds[:0]
    if table.sums is None:
        return Peeled(keys, None, success)
    if table.sums.shape[0] != table.header.shape[0]:
        raise ValueError(f"the header has {table.header.shape[0]} cells but the sums have {table.sums.shape[0]}")
    return Peeled(keys, torch.ops.oases.peel_values(table.sums, keys, owners, rounds, seed), success)


def pack_values(support: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Lay the values of one rank out in the order of all keys, ready to be summed over the ranks.

    support: int64 [s], ascending, as `peel_decode` returns it; keys: int64 [m], all of them in support; values:
    [m, n]. Returns [s, n] of the dtype of values, zero where this rank has no value. Values of one key are added up,
    on CUDA in no fixed order; where keys come once each, it is deterministic. ValueError for a key that is not in
    support; to know, a CUDA call waits for the device.
    """
    places = torch.searchsorted(support, keys)
    known = places < support.shape[0]
    if support.shape[0]:
        known &= support[places.clamp(max=support.shape[0] - 1)] == keys
    if not bool(known.all()):
        raise ValueError(f"key {int(keys[~known][0])} is not in the support")
    return values.new_zeros(support.shape[0], values.shape[1]).index_add_(0, places, values)


def _peel_keys_fake(header: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = torch.library.get_ctx().new_dynamic_size()
    return (
        header.new_empty(found),
        header.new_empty(found),
        header.new_empty(found),
        header.new_empty((), dtype=torch.bool),
    )


torch.library.register_fake("oases::peel_keys", _peel_keys_fake)
