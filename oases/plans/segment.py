"""Segments of a plan: consecutive blocks of one degree, and the list of ops that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from oases.schedule import WHOLE, Schedule, ScheduleError, from_text, generate, is_text, sequence_parallel

AUTO = "auto"
"""As a segment's schedule: the fastest of several, chosen by measuring them on the first steps."""

generated = lru_cache(maxsize=512)(generate)
"""As `generate`, remembered: a search asks for the same lists many times."""
_cut_along_sequence = lru_cache(maxsize=64)(sequence_parallel)


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of one tensor-parallel degree, run as one stack.

    schedule: the name of a generator, the text of a list for as many blocks, or "auto". recomputed_layers: layers of
    the segment, from its first, that the backward pass computes again; a text says itself what is recomputed.
    sequence_parallel: between its blocks each of the tp ranks holds its part of the sequence.
    """

    num_blocks: int
    tp: int
    schedule: str = "oases"
    sub_batches: int = 2
    recomputed_layers: int = 0
    sequence_parallel: bool = False

    @property
    def parts(self) -> int:
        """Parts that its schedule cuts a batch's samples into."""
        if is_text(self.schedule):
            made = from_text(self.schedule, "block")
            return made.num_sub_batches if made.along == "batch" else 1
        return 1 if self.schedule in (AUTO, *WHOLE) else self.sub_batches

    @property
    def name(self) -> str:
        """The schedule's name with its sub-batches, e.g. "oases@2"."""
        name = from_text(self.schedule, "block").name if is_text(self.schedule) else self.schedule
        return f"{name}@{self.parts}" if self.parts > 1 else name

    def generated(self) -> Schedule:
        """The list of ops that the segment's stack runs. ScheduleError where there is none before it is measured."""
        if self.schedule == AUTO:
            raise ScheduleError("schedule auto has no list before the first steps have chosen one; name a schedule")
        if is_text(self.schedule):
            made = from_text(self.schedule, "block")
            if made.num_blocks != self.num_blocks:
                raise ScheduleError(
                    f"schedule {made.name} is for {made.num_blocks} blocks, its segment has {self.num_blocks}"
                )
        else:
            made = generated(self.schedule, self.num_blocks, self.sub_batches, self.recomputed_layers)
        return _cut_along_sequence(made) if self.sequence_parallel else made


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its segments in order."""

    segments: tuple[Segment, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of all segments."""
        return sum(segment.num_blocks for segment in self.segments)
