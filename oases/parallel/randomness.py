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
        self._devices = [device] if device.type != "cpu" else []
        self._device_type = device.type if device.type != "cpu" else "cuda"
        self._active = active

    @contextmanager
    def of(self, method: Literal["partial", "combine"], block: int, sub_batch: int) -> Iterator[None]:
        """Draw from the stream of one op; the caller's own random state stays as it is."""
        if not self._active:
            yield
            return
        rank = self._rank if method == "partial" else 0
        text = repr((*self._key, method, block, sub_batch, rank))
        with torch.random.fork_rng(self._devices, device_type=self._device_type):
            torch.manual_seed(hash_of(text))
            yield


def hash_of(text: str) -> int:
    """A number below 2 ** 56 that is the same for the same text on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
