"""Random numbers that do not depend on when, how often or in which cut a block runs.

Each (call, method, block, sub-batch) draws from a stream of its own, so a recomputed mask is the mask. `combine`,
after the all-reduce, draws the same on every tensor-parallel rank, as it must; `partial`, on a rank's own heads and
features, draws differently. `ParallelDropout` goes further: its masks belong to samples, tokens and features of the
whole batch, so they are those of the model that nobody cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from oases._C import generator_mark

MethodName = Literal["partial", "prepare", "product", "combine"]
Function = Callable[[], Tensor]


@dataclass(frozen=True)
class Extent:
    """What of the whole batch a tensor [samples, tokens, ...] holds. of_tokens: the whole's tokens; 0: all here."""

    first_sample: int
    samples: int
    first_token: int = 0
    of_tokens: int = 0


Extents = Callable[[int], Extent]
"""The extent of what an op gets, by its sub-batch."""


@dataclass
class _Draws:
    """The masks of one op: counted, so that each has a stream of its own."""

    key: str
    rank: int
    size: int
    extent: Extent
    shared: bool
    count: int = 0


_drawing: ContextVar[_Draws | None] = ContextVar("oases_draws", default=None)


class Randomness:
    """The streams of one call. seed: what rank 0's `torch.manual_seed` gave; call: counts the calls of a stack.

    active: whether anything may be drawn, in training. draws: by (block, method), whether it drew so far; kept by the
    stack from call to call, because saving, seeding and restoring a generator costs more than a small op does, and
    most blocks draw nothing. first_block, first_sample: where the stack's blocks begin in the model, and its samples
    in the batch.
    """

    def __init__(
        self,
        seed: int,
        call: int,
        rank: int,
        device: torch.device,
        draws: dict[tuple[int, MethodName], bool],
        *,
        active: bool,
        size: int = 1,
        first_block: int = 0,
        first_sample: int = 0,
    ) -> None:
        self._key = (seed, call)
        self._first_block, self._first_sample = first_block, first_sample
        self._rank, self._size = rank, size
        # Not torch.manual_seed: it reaches for every device there might be, which costs more than small ops do.
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.active = active
        self._draws = draws
        self._before: list[Tensor] = []
        self._marks: list[int] = []

    def begin(self) -> None:
        """Before the ops of a forward pass: note the caller's own random state, which they leave as it is."""
        if self.active:
            self._before = [generator.get_state() for generator in self._generators]
            self._marks = self._marked()

    def end(self) -> None:
        """After the forward pass, which has left that state as it was."""
        self._before = []

    def run(self, method: MethodName, block: int, sub_batch: int, extent: Extents, function: Function) -> Tensor:
        """Run one op of a forward pass, with a stream of its own if it draws; extent(sub_batch): what it gets.

        One that has drawn nothing so far runs as it is. Should it draw this time, it is run again, with its stream.
        """
        if not self.active:
            return function()
        if self._draws.get((block, method)) is False:
            result = function()
            if self._marked() == self._marks:
                return result
            self._restore(self._before)
        return self._isolated(method, block, sub_batch, extent(sub_batch), function)

    def again(self, method: MethodName, block: int, sub_batch: int, extent: Extents, function: Function) -> Tensor:
        """Run an op once more in the backward pass, with the numbers it drew before, if it drew any."""
        if not self.active or not self._draws.get((block, method), True):
            return function()
        return self._isolated(method, block, sub_batch, extent(sub_batch), function)

    def _isolated(self, method: MethodName, block: int, sub_batch: int, extent: Extent, function: Function) -> Tensor:
        # partial, and product, which is its second half, work on the rank's own heads and features.
        shared = method in ("combine", "prepare")
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
    """The next mask of the op that runs: ones with probability `keep`, else zeros, of the shape of `x`.

    Every sample has a stream of its own, of its number in the whole batch. cut: the dimension of `x` that is cut over
    the tensor-parallel ranks; "whole" if none is; "unknown": other ranks draw others, unless the op's tensors are
    whole anyhow. None where masks by sample cannot be had: outside of a stack, or the samples do not lead `x`.
    """
    draws = _drawing.get()
    if draws is None or x.dim() == 0 or x.shape[0] == 0 or x.shape[0] % draws.extent.samples:
        return None
    extent = draws.extent
    per_sample = x.shape[0] // extent.samples
    shape = [per_sample, *x.shape[1:]]  # [1, tokens, ...] where the samples are dimension 0 themselves
    windows: list[tuple[int, int]] = []  # (dimension, first) of what is here, in the mask of the whole
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
    """A number below 2 ** 56 that is the same for the same text on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
