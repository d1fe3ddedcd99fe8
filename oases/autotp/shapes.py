"""Track a sharded dimension through a view; arithmetic on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

Segments = tuple[int, ...]
"""Lengths along a dimension, each sharded evenly over the ranks."""


class Copied(tuple[int, ...]):
    """Segments of heads of which there are fewer than ranks, each on `copies` neighbouring ranks.

    Lengths are those of all copies, side by side: copies times those of the tensor.
    """

    copies: int

    def __new__(cls, lengths: Segments, copies: int) -> Copied:
        """Segments of these lengths, copies included."""
        made = super().__new__(cls, lengths)
        made.copies = copies
        return made

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.copies == copies_of(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.copies))


def copies_of(segments: object) -> int:
    """Number of ranks that hold each part of a dimension."""
    return segments.copies if isinstance(segments, Copied) else 1


@dataclass(frozen=True)
class Split:
    """Sharding along dimension `dim`, whose full length is the sum of the segments, or of one copy of them."""

    dim: int
    segments: Segments

    @property
    def copies(self) -> int:
        """Number of ranks that hold each part."""
        return copies_of(self.segments)


def groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Smallest groups of dimensions of both shapes that hold the same elements, in order."""
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        size_i = size_j = 1
        if i < len(before):
            size_i, i = before[i], i + 1
        if j < len(after):
            size_j, j = after[j], j + 1
        while size_i != size_j:
            if size_i < size_j:
                if i == len(before):
                    return [(range(len(before)), range(len(after)))]
                size_i, i = size_i * before[i], i + 1
            else:
                if j == len(after):
                    return [(range(len(before)), range(len(after)))]
                size_j, j = size_j * after[j], j + 1
        found.append((range(first_i, i), range(first_j, j)))
    return found


def viewed(
    before: tuple[int, ...], after: tuple[int, ...], dim: int, segments: Segments
) -> tuple[int, Segments] | None:
    """The sharded dimension of `after` where `dim` of `before` is sharded, and its segments; None where there is
    none.

    Of several candidates the one that allows the most degrees.
    """
    for inside, outside in groups(before, after):
        if dim not in inside:
            continue
        outer = prod(before[d] for d in inside if d < dim)
        inner = prod(before[d] for d in inside if d > dim)
        flat = tuple(length * inner for length in segments) * outer
        found = [(d, cut) for d in outside if (cut := _of_dimension(flat, after, outside, d)) is not None]
        return max(found, key=lambda each: gcd(*each[1]), default=None)
    return None


def _of_dimension(flat: Segments, after: tuple[int, ...], outside: range, dim: int) -> Segments | None:
    """`flat` as segments of one dimension of a group, equal in all outer indices; None where it cannot be."""
    outer = prod(after[d] for d in outside if d < dim)
    inner = prod(after[d] for d in outside if d > dim)
    if len(flat) % outer:
        return None
    one = flat[: len(flat) // outer]
    if one * outer != flat or sum(one) != after[dim] * inner or any(length % inner for length in one):
        return None
    return tuple(length // inner for length in one)


def pieces(segments: Segments, lengths: list[int]) -> list[Segments] | None:
    """Segments within consecutive pieces of these lengths; None where a piece ends within a segment."""
    left, found = list(segments), []
    for length in lengths:
        mine: list[int] = []
        while sum(mine) < length and left:
            mine.append(left.pop(0))
        if sum(mine) != length:
            return None
        found.append(tuple(mine))
    return found
