"""Pipelines as planner and simulator read them, by name or in text form: parts of stages, lanes, passes, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Literal

from oases.core.schedule import Op, Schedule, from_text, generate_pipeline, is_text
from oases.core.schedule.pipeline import PASSES, Pass, require_sizes
from oases.core.schedule.schedule import Place, Placement, stage_of

Lane = Literal["to the next stage", "to the stage before", ""]
"""Lane of messages between stages; "" for none."""


def lane_of(part: int, of: Literal["F", "B"], num_stages: int, placement: Placement) -> Lane:
    """Lane that carries a part's activation (F) or gradient (B); "" where the part that reads it is on its stage."""
    reader = part + 1 if of == "F" else part - 1
    if stage_of(part, num_stages, placement) == stage_of(reader, num_stages, placement):
        return ""
    back = placement == "v" and part // num_stages % 2 == 1
    return "to the stage before" if (of == "B") != back else "to the next stage"


def passes_of(ops: Sequence[Op]) -> Iterator[Pass]:
    """Iterate over the passes in a stage's list, in order."""
    for op, after in zip_longest(ops, ops[1:]):
        inside = op.kind == "R" and after == ("B", op.block, op.sub_batch, None)
        if op.kind in ("F", "R", "B", "W") and not inside:
            yield op.kind, op.block, op.sub_batch


@dataclass(frozen=True)
class StageReading:
    """Properties of one pipeline stage, read off its passes by the planner.

    early: (part, micro-batch) pairs recomputed before their gradient arrives. in_flight: maximum number of
    micro-batches between forward and backward pass. held: (those in flight, those with deferred weight gradients) at
    a time, when another pass than their W begins, without pairs of which another one has as many of both.
    has_weights: whether weight gradients are passes of their own. last: the stage's last pass, after which no
    gradient is accumulated.
    """

    early: frozenset[Place]
    in_flight: int
    held: tuple[tuple[int, int], ...]
    has_weights: bool
    last: Pass

    @staticmethod
    def of(ops: Sequence[Op]) -> StageReading:
        """Read the ops of a stage."""
        return StageReading.of_passes(passes_of(ops))

    @staticmethod
    def of_passes(passes: Iterator[Pass]) -> StageReading:
        """Read the passes of a stage, at least one."""
        early: set[Place] = set()
        flying = backward = weights = 0
        most: dict[int, int] = {}  # in flight, by the number of deferred weight gradients
        last: Pass | None = None
        for last in passes:
            kind = last[0]
            if kind == "W":
                weights += 1
                continue
            flying += kind == "F"
            if kind == "R":
                early.add(last[1:])
            if flying > most.get(backward - weights, 0):
                most[backward - weights] = flying
            if kind == "B":
                flying, backward = flying - 1, backward + 1
        assert last is not None, "a stage has passes"
        held = [(max(most.values()), 0)]
        if weights:
            held = []
            for waiting in sorted(most, reverse=True):
                if not held or most[waiting] > held[-1][0]:
                    held.append((most[waiting], waiting))
        return StageReading(frozenset(early), max(most.values()), tuple(held), weights > 0, last)


# --- by name or in text form ---


def _parsed(text: str) -> Schedule:
    return from_text(text, "stage")


def name_of(pipeline: str) -> str:
    """Name of a pipeline given by name or in its text form."""
    return _parsed(pipeline).name if is_text(pipeline) else pipeline


@lru_cache(maxsize=16)
def resolve_pipeline(pipeline: str, num_stages: int, num_micro_batches: int, recompute: bool = True) -> Schedule:
    """Resolve a pipeline given by name or in its text form. Raises ScheduleError."""
    require_sizes(pipeline, num_stages, num_micro_batches)
    return (
        _parsed(pipeline)
        if is_text(pipeline)
        else generate_pipeline(pipeline, num_stages, num_micro_batches, recompute)
    )


@lru_cache(maxsize=64)
def chunks_of(pipeline: str) -> int:
    """Model parts per stage of a pipeline given by name or in its text form."""
    return _parsed(pipeline).chunks if is_text(pipeline) else generate_pipeline(pipeline, 2, 2).chunks


@lru_cache(maxsize=64)
def placement_of(pipeline: str) -> Placement:
    """Placement of the model parts of a pipeline given by name or in its text form."""
    return _parsed(pipeline).placement if is_text(pipeline) else generate_pipeline(pipeline, 2, 2).placement


@lru_cache(maxsize=1024)
def parts_on(pipeline: str, num_stages: int, stage: int) -> tuple[int, ...]:
    """Model parts of a stage, in order."""
    placement = placement_of(pipeline)
    parts = range(num_stages * chunks_of(pipeline))
    return tuple(part for part in parts if stage_of(part, num_stages, placement) == stage)


def passes(pipeline: str, num_stages: int, num_micro_batches: int, stage: int) -> Iterator[Pass]:
    """Iterate over the passes of one stage, of a pipeline given by name or in its text form. Raises ScheduleError.

    No list is built for a name: a planner looks at thousands of micro-batches.
    """
    require_sizes(pipeline, num_stages, num_micro_batches)
    if is_text(pipeline):
        return passes_of(_parsed(pipeline).stages[stage])
    return PASSES[pipeline](num_stages, num_micro_batches, stage, chunks_of(pipeline))


@lru_cache(maxsize=4096)
def read_stage(pipeline: str, num_stages: int, num_micro_batches: int, stage: int) -> StageReading:
    """Properties of a stage that follow from its passes, of a pipeline given by name or in its text form."""
    return StageReading.of_passes(passes(pipeline, num_stages, num_micro_batches, stage))


def enough(pipeline: str, num_stages: int) -> int:
    """Micro-batches that suffice to read a stage: those of a text, or so many that more change nothing."""
    return _parsed(pipeline).num_sub_batches if is_text(pipeline) else 4 * num_stages


def in_flight(pipeline: str, num_stages: int, num_micro_batches: int, stage: int) -> int:
    """Maximum number of micro-batches between forward and backward pass on the stage, over all its parts."""
    few = min(num_micro_batches, enough(pipeline, num_stages))
    if few < num_micro_batches:
        found = read_stage(pipeline, num_stages, few, stage).in_flight
        if found < few * chunks_of(pipeline):  # steady state: 1F1B
            return found
    return read_stage(pipeline, num_stages, num_micro_batches, stage).in_flight
