"""Lowering of schedules to programs: each op becomes instructions with seconds and bytes from a cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from oases.core.schedule import Op, Schedule
from oases.core.schedule.ops import STARTS
from oases.plans.pipelines import lane_of
from oases.simulator.cost import ExpertCosts, StackCosts
from oases.simulator.program import Compute, Instruction, Program, Receive, Send, Start, Wait


class Step(NamedTuple):
    """Instruction and the op it comes from; None for the entry and exit of a stack."""

    instruction: Instruction
    op: Op | None
    backward: bool


@dataclass(frozen=True)
class StagePasses:
    """Instructions of one model part's passes on a pipeline stage, as functions of the micro-batch.

    recompute, weights: of ops R and W. message_seconds: transfer time of the activation to the next part;
    gradient_seconds: of the gradient to the part before.
    """

    forward: Callable[[int], Sequence[Instruction]]
    backward: Callable[[int], Sequence[Instruction]]
    recompute: Callable[[int], Sequence[Instruction]] = lambda m: ()
    weights: Callable[[int], Sequence[Instruction]] = lambda m: ()
    message_seconds: float = 0.0
    gradient_seconds: float = 0.0

    @staticmethod
    def by_kind(part: int, seconds: Mapping[str, float]) -> StagePasses:
        """Passes of a single compute instruction: seconds by F, R, B, W and send, 0 for kinds not given."""

        def compute(kind: str) -> Callable[[int], Sequence[Instruction]]:
            return lambda m: (Compute(f"{kind} {part}.{m}", seconds.get(kind, 0.0)),)

        sent = seconds.get("send", 0.0)
        return StagePasses(compute("F"), compute("B"), compute("R"), compute("W"), sent, sent)


Costs = StackCosts | ExpertCosts | Sequence[StagePasses]
"""Costs of tensor-parallel blocks, of blocks of experts, or of each model part of a pipeline, in order."""


def lower(schedule: Schedule, costs: Costs, prefix: str = "") -> tuple[tuple[Step, ...], ...]:
    """Instructions of each distinct rank: one per stage of a pipeline, else a single one.

    prefix: makes names of collectives unique among several stacks or passes in one program. Raises ValueError for
    costs of another unit or another number of blocks.
    """
    if isinstance(costs, StackCosts):
        _require("block", len(costs.times), schedule)
        return (tuple(_of_blocks(schedule, costs, prefix)),)
    if isinstance(costs, ExpertCosts):
        _require("experts", schedule.num_blocks, schedule)
        return (tuple(Step(_of_experts(op, schedule, costs, prefix), op, op.in_backward) for op in schedule),)
    _require("stage", len(costs), schedule)
    return tuple(
        tuple(Step(each, op, op.in_backward) for op in ops for each in _of_stage(op, costs[op.block], schedule))
        for ops in schedule.stages
    )


def program_of(schedule: Schedule, costs: Costs) -> Program:
    """Program of one step of a schedule."""
    ranks = tuple(tuple(step.instruction for step in steps) for steps in lower(schedule, costs))
    return Program(schedule.name, ranks, costs.links if isinstance(costs, StackCosts) else {})


def _require(unit: str, blocks: int, schedule: Schedule) -> None:
    if unit != schedule.unit or blocks != schedule.num_blocks:
        raise ValueError(
            f"{schedule.name} has {schedule.num_blocks} blocks of sort {schedule.unit!r}, got costs of {blocks} of "
            f"sort {unit!r}"
        )


def _of_stage(op: Op, part: StagePasses, schedule: Schedule) -> Sequence[Instruction]:
    if op.kind == "receive":
        sender = op.block - 1 if op.of == "F" else op.block + 1
        return (Receive(f"{op.of} {sender}.{op.sub_batch}"),)
    if op.kind == "send":
        of: Literal["F", "B"] = "F" if op.of == "F" else "B"
        seconds = part.message_seconds if of == "F" else part.gradient_seconds
        return (Send(str(op.carried), seconds, lane_of(op.block, of, schedule.num_stages, schedule.placement)),)
    passes = {"F": part.forward, "B": part.backward, "R": part.recompute, "W": part.weights}
    return passes[op.kind](op.sub_batch)


def _of_experts(op: Op, schedule: Schedule, costs: ExpertCosts, prefix: str) -> Instruction:
    if op.kind == "wait":
        return Wait(f"{prefix}{schedule.starts[op.carried]}")
    if op.kind in STARTS:
        return Start(f"{prefix}{op}", costs.link, costs.seconds(op))
    return Compute(f"{prefix}{op}", costs.seconds(op))


def _of_blocks(schedule: Schedule, costs: StackCosts, prefix: str) -> Iterator[Step]:
    held = _Memory(schedule, costs)
    tokens = costs.exchange_link[0] if costs.exchange_link else costs.link

    def of(op: Op) -> Iterator[Instruction]:
        if op.kind in STARTS:
            link = tokens if op.kind == "all_to_all" else costs.link
            yield Start(f"{prefix}{op}", link, costs.seconds(op, schedule))
            return
        if op.kind == "wait":
            yield Wait(f"{prefix}{schedule.starts[op.carried]}")
            return
        times_run = schedule.num_sub_batches if op.block in schedule.joint and op.kind in "FRBW" else 1
        if sent := costs.inside(op, schedule):
            name = f"{prefix}all_to_all in {op}"
            yield from (Start(name, tokens, times_run * sent), Wait(name))
        allocates, frees = (times_run * each for each in held.of(op))
        yield Compute(f"{prefix}{op}", times_run * costs.seconds(op, schedule), allocates, frees)

    for backward, ops in enumerate((schedule.forward, schedule.backward)):
        if costs.overhead[backward] and ops:
            name = f"{prefix}enter backward" if backward else f"{prefix}enter"
            yield Step(Compute(name, costs.overhead[backward]), None, bool(backward))
        for op in ops:
            yield from (Step(each, op, bool(backward)) for each in of(op))
    handed = schedule.num_sub_batches * costs.bytes_of(0).unit  # the caller holds the gradient of the stack's input
    if schedule.backward and handed:
        yield Step(Compute(f"{prefix}leave", 0.0, 0, handed), None, True)


class _Memory:
    """Bytes that each compute op allocates when it begins and frees when it ends.

    Live between ops: x, an input of a block that is still to be read or is kept; y, partial sums in flight; g, a
    gradient in flight; and the kept activations of a block with a graph, x included. Under sequence parallelism x is
    gathered, and a rank's part of it is held, too.
    """

    def __init__(self, schedule: Schedule, costs: StackCosts) -> None:
        self._schedule = schedule
        self._costs = costs
        self._deferred = {(op.block, op.sub_batch) for op in schedule if op.kind == "W"}

    def of(self, op: Op) -> tuple[int, int]:
        if self._costs.no_bytes:
            return 0, 0
        size, place = self._costs.bytes_of(op.block), (op.block, op.sub_batch)
        schedule = self._schedule
        if op.kind == "F":
            entry = 0 if op.block else size.unit  # the stack's input; C allocates other blocks' inputs
            if ("R", *place) not in schedule.recomputed:
                return entry + size.kept - size.part, 0  # allocates y; x is part of the kept activations
            return entry + size.unit, size.unit + size.part if place in schedule.recomputed_inputs else 0
        if op.kind in ("C", "RC"):  # replaces y; unused results are freed at once
            read = op.kind == "C" or (op.block + 1, op.sub_batch) in schedule.recomputed_inputs
            last = op.block + 1 == schedule.num_blocks
            part = 0 if last or not read else self._costs.bytes_of(op.block + 1).part
            return size.unit + part, size.unit if read else 2 * size.unit
        if op.kind == "R":
            whole = size.unit if op in schedule.starts else 0
            return size.kept - size.unit - size.part + whole, 0
        if op.kind == "B":  # allocates g; frees its gradient and the kept activations
            kept = 0 if place in self._deferred else size.kept
            return size.unit, size.unit + kept
        if op.kind == "W":
            return 0, size.kept
        return 0, 0
