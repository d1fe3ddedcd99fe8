"""Segments of a plan: consecutive blocks of one degree and the schedule that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from oases.core.schedule import AUTO, WHOLE, Schedule, ScheduleError, from_text, generate, is_text, sequence_parallel

generated = lru_cache(maxsize=512)(generate)
"""Cached `generate`: a search asks for the same lists many times."""
_cut_along_sequence = lru_cache(maxsize=64)(sequence_parallel)


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of one tensor-parallel degree, run as one stack.

    schedule: name of a generator, text of a list for as many blocks, or "auto". sub_batches: 0 has "auto" choose
    them, too. recomputed_layers: layers of the segment, from its first, that the backward pass recomputes; a text
    states its own. sequence_parallel: each of the tp ranks holds a shard of the sequence between blocks.
    """

    num_blocks: int
    tp: int
    schedule: str = "oases"
    sub_batches: int = 2
    recomputed_layers: int = 0
    sequence_parallel: bool = False

    @property
    def parts(self) -> int:
        """Sub-batches into which the schedule splits the batch dimension."""
        if is_text(self.schedule):
            made = from_text(self.schedule, "block")
            return made.num_sub_batches if made.along == "batch" else 1
        return 1 if self.schedule in WHOLE else self.sub_batches or 1

    @property
    def name(self) -> str:
        """Name of the schedule with its sub-batches, e.g. "oases@2"."""
        name = from_text(self.schedule, "block").name if is_text(self.schedule) else self.schedule
        return f"{name}@{self.parts}" if self.parts > 1 else name

    def generated(self, layer_of: tuple[int, ...] | None = None) -> Schedule:
        """Schedule that the segment's stack runs. layer_of: layer of each block; None for pairs of blocks.

        Raises ScheduleError for "auto", which is chosen by measuring.
        """
        if self.schedule == AUTO:
            raise ScheduleError("schedule auto is chosen on the first steps; name a schedule")
        if is_text(self.schedule):
            made = from_text(self.schedule, "block")
            if made.num_blocks != self.num_blocks:
                raise ScheduleError(
                    f"schedule {made.name} is for {made.num_blocks} blocks, its segment has {self.num_blocks}"
                )
        else:
            made = generated(self.schedule, self.num_blocks, self.sub_batches, self.recomputed_layers, layer_of)
        return _cut_along_sequence(made) if self.sequence_parallel else made


@dataclass(frozen=True)
class Stage:
    """Pipeline stage: its segments in order."""

    segments: tuple[Segment, ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all segments."""
        return sum(segment.num_blocks for segment in self.segments)
