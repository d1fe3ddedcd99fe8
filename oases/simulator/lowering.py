"""Turns schedules into programs: each op becomes an instruction with the seconds and bytes of a cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from oases.schedule import Op, Schedule
from oases.schedule.ops import STARTS
from oases.simulator.cost import StackCosts
from oases.simulator.program import Compute, Instruction, Receive, Send, Start, Wait


def lower(schedule: Schedule, costs: StackCosts, prefix: str = "") -> tuple[list[Instruction], list[Instruction]]:
    """The forward and the backward pass of a tensor-parallel schedule as one rank's instructions.

    prefix: told apart by it are the collectives of several stacks, or of several passes, in one program.
    """
    pass_ = _Lowering(schedule, costs, prefix)
    return list(pass_.forward()), list(pass_.backward())


@dataclass(frozen=True)
class StagePasses:
    """What one stage of a pipeline does for a micro-batch, given its number: instructions of its passes.

    recompute, weights: of ops R and W of their own. message_seconds: of an activation, or a gradient, on its way to
    the next stage.
    """

    forward: Callable[[int], Sequence[Instruction]]
    backward: Callable[[int], Sequence[Instruction]]
    recompute: Callable[[int], Sequence[Instruction]] = lambda m: ()
    weights: Callable[[int], Sequence[Instruction]] = lambda m: ()
    message_seconds: float = 0.0

    @staticmethod
    def by_kind(stage: int, seconds: Mapping[str, float]) -> StagePasses:
        """Each pass a single piece of compute: seconds by F, R, B, W and send, 0 for what is not named."""

        def compute(kind: str) -> Callable[[int], Sequence[Instruction]]:
            return lambda m: (Compute(f"{kind} {stage}.{m}", seconds.get(kind, 0.0)),)

        return StagePasses(compute("F"), compute("B"), compute("R"), compute("W"), seconds.get("send", 0.0))


def lower_pipeline(pipeline: Schedule, stages: Sequence[StagePasses]) -> tuple[tuple[Instruction, ...], ...]:
    """Every stage's instructions. stages: the passes of each part of the model, in its order."""
    return tuple(tuple(_lower_stage(ops, stages)) for ops in pipeline.stages)


def _lower_stage(ops: Sequence[Op], parts: Sequence[StagePasses]) -> Iterator[Instruction]:
    for op in ops:
        passes = parts[op.block]
        does = {"F": passes.forward, "B": passes.backward, "R": passes.recompute, "W": passes.weights}
        if op.kind == "receive":
            sender = op.block - 1 if op.of == "F" else op.block + 1
            yield Receive(f"{op.of} {sender}.{op.sub_batch}")
        elif op.kind == "send":
            link = "to the next stage" if op.of == "F" else "to the stage before"
            yield Send(str(op.carried), passes.message_seconds, link)
        else:
            yield from does[op.kind](op.sub_batch)


class _Lowering:
    def __init__(self, schedule: Schedule, costs: StackCosts, prefix: str) -> None:
        self._schedule = schedule
        self._costs = costs
        self._prefix = prefix
        self._held = _Memory(schedule, costs)

    def forward(self) -> Iterator[Instruction]:
        yield from self._overhead("enter", self._costs.overhead[0])
        yield from map(self._lowered, self._schedule.forward)

    def backward(self) -> Iterator[Instruction]:
        if self._schedule.backward:
            yield from self._overhead("enter backward", self._costs.overhead[1])
            yield from map(self._lowered, self._schedule.backward)
            # The gradient of the stack's input is the caller's.
            handed = self._schedule.num_sub_batches * self._costs.bytes_of(0).unit
            yield from [Compute(f"{self._prefix}leave", 0.0, 0, handed)] if handed else []

    def _overhead(self, name: str, seconds: float) -> Iterator[Instruction]:
        if seconds:
            yield Compute(self._prefix + name, seconds)

    def _lowered(self, op: Op) -> Instruction:
        if op.kind in STARTS:
            return Start(self._ticket(op), self._costs.link, self._costs.collectives.get(op.kind, 0.0))
        if op.kind == "wait":
            return Wait(self._ticket(self._schedule.starts[op.carried]))
        times = self._costs.times[op.block]
        times_run = self._schedule.num_sub_batches if op.block in self._schedule.joint and op.kind in "FRBW" else 1
        allocates, frees = (times_run * each for each in self._held.of(op))
        return Compute(self._prefix + str(op), times_run * times.of(op, self._schedule), allocates, frees)

    def _ticket(self, start: Op) -> str:
        return f"{self._prefix}{start}"


class _Memory:
    """Bytes that each compute op allocates when it begins and frees when it ends.

    Between the ops live: x, the input of a block that is still to be read or is kept; y, the partial sums on the
    wire; g, the gradient on the wire; and of a block with a graph what its backward pass needs, x included.
    """

    def __init__(self, schedule: Schedule, costs: StackCosts) -> None:
        self._schedule = schedule
        self._costs = costs
        self._put_off = {(op.block, op.sub_batch) for op in schedule if op.kind == "W"}

    def of(self, op: Op) -> tuple[int, int]:
        if self._costs.no_bytes:
            return 0, 0
        size, place = self._costs.bytes_of(op.block), (op.block, op.sub_batch)
        schedule = self._schedule
        if op.kind == "F":
            entry = 0 if op.block else size.unit  # the stack's input; other blocks' came with C
            if ("R", *place) not in schedule.recomputed:
                return entry + size.kept, 0  # y comes, and x is among what is kept
            return entry + size.unit, size.unit if place in schedule.remade_inputs else 0
        if op.kind in ("C", "RC"):  # out in the place of y; made again for nobody, it goes at once
            read = op.kind == "C" or (op.block + 1, op.sub_batch) in schedule.remade_inputs
            return size.unit, size.unit if read else 2 * size.unit
        if op.kind == "R":
            whole = size.unit if op in schedule.starts else 0
            return size.kept - size.unit + whole, 0
        if op.kind == "B":  # g comes; the gradient it was made from goes, and with it what was kept
            kept = 0 if place in self._put_off else size.kept
            return size.unit, size.unit + kept
        if op.kind == "W":
            return 0, size.kept
        return 0, 0
