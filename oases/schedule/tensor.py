"""Generators of tensor-parallel schedules: pure functions of the number of blocks and sub-batches.

`sync` is ordinary tensor parallelism (Megatron-LM); `oases` keeps one all-reduce in flight under the compute
of another sub-batch, across layer borders, forward and backward (arXiv 2305.16121, cross-pass overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oases.schedule.ir import Op, Schedule, ScheduleError
from oases.schedule.validate import validate


def sync(num_blocks: int, num_sub_batches: int = 1) -> Schedule:
    """Every all-reduce is waited for at once: nothing is hidden."""

    def ops() -> Iterator[Op]:
        for b in range(num_blocks):
            for s in range(num_sub_batches):
                yield Op("F", b, s)
                yield Op("all_reduce", b, s, "F")
                yield Op("wait", b, s, "F")
                yield Op("C", b, s)
        for b in reversed(range(num_blocks)):
            for s in reversed(range(num_sub_batches)):
                yield Op("B", b, s)
                yield Op("all_reduce", b, s, "B")
                yield Op("wait", b, s, "B")

    return Schedule("sync", num_blocks, num_sub_batches, tuple(ops()))


def oases(num_blocks: int, num_sub_batches: int = 2) -> Schedule:
    """The all-reduce of one sub-batch runs under the blocks of the others, from the first block to the last.

    A result is waited for only when the next block of the same sub-batch needs it. Exposed: the last
    all-reduce of each pass, and the first block of the first sub-batch.
    """

    def ops() -> Iterator[Op]:
        for b in range(num_blocks):
            for s in range(num_sub_batches):
                if b > 0:
                    yield from _received(b - 1, s)
                yield Op("F", b, s)
                yield Op("all_reduce", b, s, "F")
        for s in range(num_sub_batches):
            yield from _received(num_blocks - 1, s)
        # The sub-batch that finished last goes first, as in the paper's backward pass.
        for b in reversed(range(num_blocks)):
            for s in reversed(range(num_sub_batches)):
                if b < num_blocks - 1:
                    yield Op("wait", b + 1, s, "B")
                yield Op("B", b, s)
                yield Op("all_reduce", b, s, "B")
                yield Op("W", b, s)
        for s in reversed(range(num_sub_batches)):
            yield Op("wait", 0, s, "B")

    return Schedule("oases", num_blocks, num_sub_batches, tuple(ops()))


def _received(block: int, sub_batch: int) -> Iterator[Op]:
    yield Op("wait", block, sub_batch, "F")
    yield Op("C", block, sub_batch)


GENERATORS: dict[str, Callable[[int, int], Schedule]] = {"sync": sync, "oases": oases}


def generate(name: str, num_blocks: int, num_sub_batches: int) -> Schedule:
    """Return the named schedule, validated. `sync` has no use for sub-batches and runs the batch whole."""
    if name not in GENERATORS:
        raise ScheduleError(f"unknown schedule {name!r}; known are {', '.join(sorted(GENERATORS))}")
    schedule = GENERATORS[name](num_blocks, 1 if name == "sync" else num_sub_batches)
    validate(schedule)
    return schedule
