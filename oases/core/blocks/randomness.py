"""Random numbers that do not depend on when, how often or in which split a block runs.

Each (call, method, block, sub-batch) draws from a stream of its own, so a recomputed mask equals the first one.
`combine`, after the all-reduce, draws the same on every tensor-parallel rank, as it must; `partial`, on a rank's own
heads and features, draws differently. The masks of `ParallelDropout` belong to samples, tokens and features of the
whole batch, so they equal those of the unsharded model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from oases.core.execution.piece import default_generators
from oases.extension import generator_mark

MethodName = Literal["partial", "prepare", "product", "combine", "prologue"]
Function = Callable[[], Tensor]


@dataclass(frozen=True)
class Extent:
    """Part of the whole batch in a tensor [samples, tokens, ...]. of_tokens: tokens of the whole; 0 where all are
    here.
    """

    first_sample: int
    samples: int
    first_token: int = 0
    of_tokens: int = 0


Extents = Callable[[int], Extent]
"""Extent of an op's tensors, by its sub-batch."""


@dataclass
class _Draws:
    """Masks of one op, counted, so that each has a stream of its own."""

    key: str
    rank: int
    size: int
    extent: Extent
    shared: bool
    count: int = 0


_drawing: ContextVar[_Draws | None] = ContextVar("oases_draws", default=None)


class Randomness:
    """Random streams of one call. seed: rank 0's `torch.manual_seed`; call: number of the stack's call.

    draws: by (block, method), whether it has drawn so far; kept by the stack between calls, because saving, seeding
    and restoring a generator costs more than a small op, and most blocks draw nothing. first_block, first_sample:
    offsets of the stack's blocks in the model, and of its samples in the batch.
    """

    def __init__(
        self,
        seed: int,
        call: int,
        rank: int,
        device: torch.device,
        draws: dict[tuple[int, MethodName], bool],
        *,
        size: int = 1,
        first_block: int = 0,
        first_sample: int = 0,
    ) -> None:
        self._key = (seed, call)
        self._first_block, self._first_sample = first_block, first_sample
        self._rank, self._size = rank, size
        # Not torch.manual_seed: it seeds every device, which costs more than small ops.
        self._generators = default_generators(device)
        self._draws = draws
        self._before: list[Tensor] = []
        self._marks: list[int] = []

    def begin(self) -> None:
        """Save the caller's random state, before the ops of a forward pass."""
        self._before = [generator.get_state() for generator in self._generators]
        self._marks = self._marked()

    def end(self) -> None:
        """Forget the saved state, after the forward pass."""
        self._before = []

    def run(self, method: MethodName, block: int, sub_batch: int, extent: Extents, function: Function) -> Tensor:
        """Run an op of a forward pass, with a stream of its own if it draws; extent(sub_batch): extent of its
        tensors.

        An op that has drawn nothing so far runs without a stream. If it draws now, it is run again with its stream.
        """
        if self._draws.get((block, method)) is False:
            result = function()
            if self._marked() == self._marks:
                return result
            self._restore(self._before)
        return self._isolated(method, block, sub_batch, extent(sub_batch), function)

    def again(self, method: MethodName, block: int, sub_batch: int, extent: Extents, function: Function) -> Tensor:
        """Recompute an op in the backward pass, with the same random numbers."""
        if not self._draws.get((block, method), True):
            return function()
        return self._isolated(method, block, sub_batch, extent(sub_batch), function)

    def _isolated(self, method: MethodName, block: int, sub_batch: int, extent: Extent, function: Function) -> Tensor:
        # partial, and its second half, product, work on the rank's own heads and features.
        shared = method in ("combine", "prepare", "prologue")
        place = "partial" if method == "product" else method
        number = block + self._first_block
        extent = replace(extent, first_sample=self._first_sample + extent.first_sample)
        text = repr((*self._key, place, number, sub_batch, 0 if shared else self._rank, self._first_sample))
        states = [generator.get_state() for generator in self._generators]
        draws = _Draws(repr((*self._key, place, number)), self._rank, self._size, extent, shared)
        token = _drawing.set(draws)
        try:
            for generator in self._generators:
                generator.manual_seed(hash_of(text))
            marks = self._marked()
            result = function()
            drew = draws.count > 0 or self._marked() != marks
            self._draws[block, method] = drew or self._draws.get((block, method), False)
            return result
        finally:
            _drawing.reset(token)
            self._restore(states)

    def _marked(self) -> list[int]:
        return [generator_mark(generator) for generator in self._generators]

    def _restore(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def whole_batch_mask(x: Tensor, keep: float, cut: int | Literal["whole", "unknown"]) -> Tensor | None:
    """The next dropout mask of the running op: ones with probability `keep`, else zeros, of the shape of `x`.

    Every sample has a stream, by its number in the whole batch. cut: dimension of `x` sharded over the
    tensor-parallel ranks; "whole" for none; "unknown": ranks draw different masks, unless the op's tensors are
    replicated. None where masks by sample are not available: outside of a stack, or where dimension 0 of `x` is not
    the batch.
    """
    draws = _drawing.get()
    if draws is None or x.dim() == 0 or x.shape[0] == 0 or x.shape[0] % draws.extent.samples:
        return None
    extent = draws.extent
    per_sample = x.shape[0] // extent.samples
    shape = [per_sample, *x.shape[1:]]  # [1, tokens, ...] where the samples are dimension 0 themselves
    windows: list[tuple[int, int]] = []  # (dimension, first index) of this part in the mask of the whole batch
    if extent.of_tokens and per_sample == 1 and x.dim() > 1:
        windows.append((1, extent.first_token))
        shape[1] = extent.of_tokens
    if isinstance(cut, int):
        dim = cut % x.dim()
        windows.append((dim, draws.rank * shape[dim]))
        shape[dim] *= draws.size
    own = "" if draws.shared or cut != "unknown" else f" rank {draws.rank}"
    key = f"{draws.key} mask {draws.count}{own}"
    draws.count += 1
    generator = torch.Generator(x.device)
    parts = []
    for sample in range(extent.first_sample, extent.first_sample + extent.samples):
        generator.manual_seed(hash_of(f"{key} sample {sample}"))
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(keep, generator=generator)
        for dim, first in windows:
            mask = mask.narrow(dim, first, x.shape[dim])
        parts.append(mask)
    return torch.cat(parts)


def hash_of(text: str) -> int:
    """Number below 2 ** 56, the same for the same text on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
