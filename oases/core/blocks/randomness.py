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
from typing import Any, Literal

import torch
from torch import Tensor

from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
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
class Draws:
    """Masks of one op, counted, so that each has a stream of its own."""

    key: str
    rank: int
    size: int
    extent: Extent
    shared: bool
    count: int = 0


drawing: ContextVar[Draws | None] = ContextVar("oases_draws", default=None)
"""The running op, for dropout with the masks of the whole batch, as of `oases.layers`."""


class Randomness:
    """Random streams of one call. seed: rank 0's `torch.manual_seed`; call: number of the stack's call.

    draws: by (block, method), whether it has drawn so far; kept by the stack between calls, because saving, seeding
    and restoring a generator costs more than a small op, and most blocks draw nothing. first_block, first_sample:
    offsets of the stack's blocks in the model, and of its samples in the batch.
    """

    def __init__(
        self, seed: int, call: int, rank: int, device: torch.device, draws: dict[tuple[int, MethodName], bool], *,
        size: int = 1, first_block: int = 0, first_sample: int = 0,
    ) -> None:  # fmt: skip
        self._key = (seed, call)
        self._first_block, self._first_sample = first_block, first_sample
        self._rank, self._size = rank, size
        # Not torch.manual_seed: it seeds every device, which costs more than small ops.
        self._generators = default_generators(device)
        self._draws = draws
        # The caller's random state, before the ops of a forward pass.
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
            restore(self._generators, self._before)
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
        draws = Draws(repr((*self._key, place, number)), self._rank, self._size, extent, shared)
        token = drawing.set(draws)
        try:
            for generator in self._generators:
                generator.manual_seed(hash_of(text))
            marks = self._marked()
            result = function()
            drew = draws.count > 0 or self._marked() != marks
            self._draws[block, method] = drew or self._draws.get((block, method), False)
            return result
        finally:
            drawing.reset(token)
            restore(self._generators, states)

    def _marked(self) -> list[int]:
        return [generator_mark(generator) for generator in self._generators]


class Streams:
    """Random streams of a stack. first_block, replica: its offset in the model, and the number of the batch's share.

    seed: rank 0's initial seed from the first call on, unless it was set. calls: forward passes so far, which select
    the streams.
    """

    def __init__(self, first_block: int, replica: int) -> None:
        self.seed: int | None = None
        self.calls = 0
        self._first_block, self._replica = first_block, replica
        self._agreed = False  # whether the ranks have agreed on seed and calls
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_agreed": False}

    def forget(self) -> None:
        """Forget which blocks draw, as they were replaced."""
        self._draws: dict[bool, dict[tuple[int, MethodName], bool]] = {True: {}, False: {}}  # by the mode

    def next(self, x: Tensor, group: ProcessGroup | None, *, training: bool) -> Randomness:
        """Streams of the next call, on `x`. Collective over the group the first time."""
        if not self._agreed:
            everyone = all_gather_objects((torch.initial_seed(), self.calls), group)
            self.calls = max(calls for _, calls in everyone)  # after a failure some may be a call ahead
            self.seed = everyone[0][0] if self.seed is None else self.seed
            self._agreed = True
        assert self.seed is not None
        self.calls += 1
        return Randomness(
            self.seed, self.calls, group_rank(group), x.device, self._draws[training], size=group_size(group),
            first_block=self._first_block, first_sample=self._replica * x.shape[0],
        )  # fmt: skip


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Generators that ops on `device` draw from: the CPU's, and an accelerator's own."""
    found = [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        found.append(torch.get_device_module(device).default_generators[index])
    return found


def restore(generators: list[torch.Generator], states: list[Tensor]) -> None:
    """Set the states of generators."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def hash_of(text: str) -> int:
    """Number below 2 ** 56, the same for the same text on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
