"""Pipeline schedules: for every stage its ops in issue order, messages between the stages among them.

Generators are pure functions of the number of stages and micro-batches. An op's `block` is its stage, its `sub_batch`
the micro-batch. R is an op of its own: what stands after a receive runs once the gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oases.schedule.ir import Compute, Op, ScheduleError


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
    order = [("F", m) for m in range(num_micro_batches)] + [("B", m) for m in reversed(range(num_micro_batches))]
    return _pipeline("gpipe", num_stages, num_micro_batches, recompute, lambda stage: order)


def one_f_one_b(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """As few micro-batches in flight as keep the pipeline full: then one forward, one backward pass in turn."""

    def order(stage: int) -> list[tuple[str, int]]:
        ahead = min(num_stages - 1 - stage, num_micro_batches)
        turns = [("F", m) for m in range(ahead)]
        for m in range(num_micro_batches):
            turns += [("F", m + ahead)] if m + ahead < num_micro_batches else []
            turns += [("B", m)]
        return turns

    return _pipeline("one_f_one_b", num_stages, num_micro_batches, recompute, order)


def _pipeline(
    name: str, num_stages: int, num_micro_batches: int, recompute: bool, order: Callable[[int], list[tuple[str, int]]]
) -> Pipeline:
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{name} needs at least 1 stage and 1 micro-batch, got {num_stages} and {num_micro_batches}"
        )

    def ops(stage: int) -> Iterator[Op]:
        for kind, m in order(stage):
            if kind == "F":
                yield from _pass("F", stage, m, receives=stage > 0, sends=stage < num_stages - 1)
            else:
                yield from _pass("B", stage, m, receives=stage < num_stages - 1, sends=stage > 0, recompute=recompute)

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


PIPELINES: dict[str, Callable[..., Pipeline]] = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}


def generate_pipeline(name: str, num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """The named pipeline schedule. Raises ScheduleError for an unknown name."""
    if name not in PIPELINES:
        raise ScheduleError(f"unknown pipeline {name!r}; known are {', '.join(sorted(PIPELINES))}")
    return PIPELINES[name](num_stages, num_micro_batches, recompute)
