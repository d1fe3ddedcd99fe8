"""Pipeline schedules: for every stage its ops in issue order, messages between the stages among them.

Generators are pure functions of the number of stages and micro-batches. An op's `block` is its stage, its `sub_batch`
the micro-batch. R is an op of its own: what stands after a receive runs once the gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from oases.schedule.ir import Compute, Op, ScheduleError

Turn: TypeAlias = tuple[Literal["F", "B"], int]
"""A pass, forward or backward, and its micro-batch."""


@dataclass(frozen=True)
class Pipeline:
    """One step of a pipeline. stages: each stage's ops; every rank of a stage runs the same list."""

    name: str
    num_stages: int
    num_micro_batches: int
    stages: tuple[tuple[Op, ...], ...]

    def __len__(self) -> int:
        return sum(map(len, self.stages))

    def in_flight(self, stage: int) -> int:
        """Most micro-batches whose forward pass is done on the stage and whose backward pass is not."""
        flying = most = 0
        for op in self.stages[stage]:
            flying += {"F": 1, "B": -1}.get(op.kind, 0)
            most = max(most, flying)
        return most


def gpipe(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """All forward passes, then all backward passes, the last micro-batch first."""
    return _pipeline("gpipe", num_stages, num_micro_batches, recompute)


def one_f_one_b(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """As few micro-batches in flight as keep the pipeline full: then one forward, one backward pass in turn."""
    return _pipeline("one_f_one_b", num_stages, num_micro_batches, recompute)


def _gpipe_turns(ahead: int, num_micro_batches: int) -> Iterator[Turn]:
    yield from (("F", m) for m in range(num_micro_batches))
    yield from (("B", m) for m in reversed(range(num_micro_batches)))


def _one_f_one_b_turns(ahead: int, num_micro_batches: int) -> Iterator[Turn]:
    yield from (("F", m) for m in range(min(ahead, num_micro_batches)))
    for m in range(num_micro_batches):
        if m + ahead < num_micro_batches:
            yield "F", m + ahead
        yield "B", m


def turns(name: str, num_stages: int, num_micro_batches: int, stage: int) -> Iterator[Turn]:
    """The passes of one stage in order: ("F", micro-batch) and ("B", micro-batch).

    Raises ScheduleError for an unknown name, and where there is no stage or no micro-batch.
    """
    if name not in _TURNS:
        raise ScheduleError(f"unknown pipeline {name!r}; known are {', '.join(sorted(_TURNS))}")
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{name} needs at least 1 stage and 1 micro-batch, got {num_stages} and {num_micro_batches}"
        )
    return _TURNS[name](num_stages - 1 - stage, num_micro_batches)


def in_flight(name: str, num_stages: int, num_micro_batches: int, stage: int) -> int:
    """Most micro-batches whose forward pass is done on the stage and whose backward pass is not."""
    if name == "one_f_one_b":
        return min(num_stages - stage, num_micro_batches)
    if name == "gpipe":
        return num_micro_batches
    raise ScheduleError(f"unknown pipeline {name!r}; known are {', '.join(sorted(_TURNS))}")


def _pipeline(name: str, num_stages: int, num_micro_batches: int, recompute: bool) -> Pipeline:
    def ops(stage: int) -> Iterator[Op]:
        for kind, m in turns(name, num_stages, num_micro_batches, stage):
            if kind == "F":
                yield from _pass("F", stage, m, receives=stage > 0, sends=stage < num_stages - 1)
            else:
                yield from _pass("B", stage, m, receives=stage < num_stages - 1, sends=stage > 0, recompute=recompute)

    turns(name, num_stages, num_micro_batches, 0)  # says what is wrong where there is no stage
    stages = tuple(tuple(ops(stage)) for stage in range(num_stages))
    return Pipeline(name, num_stages, num_micro_batches, stages)


def _pass(kind: Compute, stage: int, m: int, *, receives: bool, sends: bool, recompute: bool = False) -> Iterator[Op]:
    if receives:
        yield Op("receive", stage, m, kind)
    if recompute:
        yield Op("R", stage, m)
    yield Op(kind, stage, m)
    if sends:
        yield Op("send", stage, m, kind)


_TURNS: dict[str, Callable[[int, int], Iterator[Turn]]] = {
    "gpipe": _gpipe_turns,
    "one_f_one_b": _one_f_one_b_turns,
}
"""By the number of stages behind the stage, and of micro-batches."""
PIPELINES: dict[str, Callable[..., Pipeline]] = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}


def generate_pipeline(name: str, num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """The named pipeline schedule. Raises ScheduleError for an unknown name."""
    if name not in PIPELINES:
        raise ScheduleError(f"unknown pipeline {name!r}; known are {', '.join(sorted(PIPELINES))}")
    return PIPELINES[name](num_stages, num_micro_batches, recompute)
