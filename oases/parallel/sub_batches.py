"""How one batch is cut: into sub-batches, and between the blocks to this rank's part of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oases.parallel.randomness import Extent
from oases.schedule import Schedule


@dataclass(frozen=True)
class Tokens:
    """This rank's part of the sequence under sequence parallelism: the `rank`-th of `size`."""

    rank: int = 0
    size: int = 1

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of [batch, tokens, ...], a view."""
        return whole if self.size == 1 else whole.chunk(self.size, dim=1)[self.rank]


class SubBatches:
    """The sub-batches that `schedule` cuts an input of `shape`, [batch, tokens, ...], into: samples, or tokens.

    tokens: what this rank holds between the blocks. The first sub-batches are longer by one where it does not divide.
    """

    def __init__(self, shape: Sequence[int], schedule: Schedule, tokens: Tokens) -> None:
        self._shape = tuple(shape)
        self._dim = 0 if schedule.along == "batch" else 1
        self.tokens = tokens
        self.number = schedule.num_sub_batches
        short, longer = divmod(self._shape[self._dim], self.number)
        self.sizes = [short + (s < longer) for s in range(self.number)]
        """Length of each along the dimension that is cut."""

    @property
    def batch(self) -> int:
        """The samples of the whole batch."""
        return self._shape[0]

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The sub-batches of a tensor as long as the input along the dimension that is cut; views."""
        return whole.split(self.sizes, dim=self._dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The opposite of `split`."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=self._dim)

    def whole_extent(self, s: int = 0) -> Extent:
        """Every sample and token, which an op gets whose block needs every token at once."""
        return Extent(0, self.batch)

    def extent(self, s: int) -> Extent:
        """What the tensors of sub-batch `s` hold inside a block."""
        first = sum(self.sizes[:s])
        if self._dim:
            return Extent(0, self.batch, first, self._shape[1])
        return Extent(first, self.sizes[s])

    def extent_between(self, s: int) -> Extent:
        """What this rank's tensors of sub-batch `s` hold between the blocks."""
        rank, size = self.tokens.rank, self.tokens.size
        if size == 1:
            return self.extent(s)
        return replace(self.extent(s), first_token=rank * (self._shape[1] // size), of_tokens=self._shape[1])
