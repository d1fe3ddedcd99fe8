"""Random numbers that do not depend on when or how often a block runs, so that a recomputed mask is the mask.

Each (call, method, block, sub-batch) draws from a stream of its own. `combine`, after the all-reduce, draws the same
on every tensor-parallel rank, as it must; `partial`, on a rank's own heads and features, draws differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


class Randomness:
    """The streams of one call. seed: what rank 0's `torch.manual_seed` gave; call: counts the calls of a stack."""

    def __init__(self, seed: int, call: int, rank: int, device: torch.device, *, active: bool) -> None:
        self._key = (seed, call)
        self._rank = rank
        # Not torch.manual_seed: it reaches for every device there might be, which costs more than small ops do.
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._active = active

    @contextmanager
    def of(self, method: Literal["partial", "combine"], block: int, sub_batch: int) -> Iterator[None]:
        """Draw from the stream of one op; the caller's own random state stays as it is."""
        if not self._active:
            yield
            return
        rank = self._rank if method == "partial" else 0
        text = repr((*self._key, method, block, sub_batch, rank))
        states = [generator.get_state() for generator in self._generators]
        try:
            for generator in self._generators:
                generator.manual_seed(hash_of(text))
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


def hash_of(text: str) -> int:
    """A number below 2 ** 56 that is the same for the same text on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
