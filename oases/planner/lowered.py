"""Segments of a plan as instructions: the passes of one stack, with the gathers of sharded weights (FSDP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from oases.core.schedule import Op, Schedule
from oases.planner.memory import divided
from oases.plans.expert_schedules import exchanging
from oases.plans.layered import Kind, Model
from oases.plans.plan import Segment
from oases.plans.shape import GRADIENT_BYTES
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.lowering import lower
from oases.simulator.program import Compute, Instruction, Start, Wait

Tagged = tuple[tuple[Instruction, Op | None], ...]
"""Instructions, each with the op it comes from, or None."""


@dataclass(frozen=True)
class Lowered:
    """Instructions of a segment's passes.

    recompute: the part of the backward pass that can run early. backward: all of it except `weights`, the W ops of
    the segment's schedule if they are passes of their own; without W, the backward pass computes them.
    """

    forward: tuple[Instruction, ...]
    backward: Tagged
    weights: Tagged

    @staticmethod
    def of(
        hardware: Hardware, model: Model, segment: Segment, first: int, samples: float, prefix: str,
        weights_apart: bool, wire: str = "none", replicas: int = 1,
    ) -> Lowered:  # fmt: skip
        """Lower a segment. first: number of its first block, which determines the kinds of its blocks.

        replicas: number of ranks over which its weights are sharded, 1 for whole weights.
        """
        schedule = segment.generated(model.layer_numbers(first, segment.num_blocks))
        if weights_apart:
            schedule = _deferred(schedule)
        kinds = [model.kind_of(first + b) for b in range(segment.num_blocks)]
        schedule = exchanging(schedule, [b for b, kind in enumerate(kinds) if model.expert_parameters(kind)])
        costs = stack_costs(hardware, model, kinds, segment.tp, samples, schedule, wire)
        (steps,) = lower(schedule, costs, prefix)
        forward = [(step.instruction, step.op) for step in steps if not step.backward]
        rest: list[tuple[Instruction, Op | None]] = []
        weights: list[tuple[Instruction, Op | None]] = []
        for step in steps[len(forward) :]:
            late = weights_apart and step.op is not None and step.op.kind == "W"
            (weights if late else rest).append((step.instruction, step.op))
        if replicas > 1:
            ranks = segment.tp * replicas
            gathers = [_gathers(hardware, model, kind, segment.tp, ranks, prefix) for kind in kinds]
            forward = _gathered(forward, gathers, "forward")
            rest = _gathered(rest, gathers, "backward")
        return Lowered(tuple(instruction for instruction, _ in forward), tuple(rest), tuple(weights))

    @cached_property
    def recompute(self) -> tuple[Instruction, ...]:
        """Ops R and RC, with the collectives that carry them."""
        return tuple(instruction for instruction, op in self.backward if _recomputes(op))

    @cached_property
    def backward_after(self) -> Tagged:
        """The backward pass after `recompute`."""
        return tuple(each for each in self.backward if not _recomputes(each[1]))


def _deferred(schedule: Schedule) -> Schedule:
    """The schedule with a W for every B: with weight gradients as a pass of their own, stacks defer all of them."""
    known = schedule.backward_set
    ops = [
        each
        for op in schedule
        for each in ((op, Op("W", op.block, op.sub_batch)) if op.kind == "B" else (op,))
        if each is op or each not in known
    ]
    return replace(schedule, ops=tuple(ops))


@dataclass(frozen=True)
class _Gather:
    """All-gather of the weights of a block, or of its experts. copies: seconds of the copies around it."""

    what: str
    link: str
    seconds: float
    copies: float

    def start(self, block: str) -> Iterator[tuple[Instruction, Op | None]]:
        """Start it, where there is another rank."""
        if self.seconds:
            yield Start(f"{self.what} of {block}", self.link, self.seconds), None

    def end(self, block: str) -> Iterator[tuple[Instruction, Op | None]]:
        """Wait for it, and copy what came."""
        if self.seconds:
            yield Wait(f"{self.what} of {block}"), None
        yield Compute(f"copy of {self.what} of {block}", self.copies), None


def _gathers(hardware: Hardware, model: Model, kind: Kind, tp: int, ranks: int, prefix: str) -> list[_Gather]:
    """Gathers of a block on a stage of `ranks` ranks; none of what one rank has in the type that it computes in."""
    found = []
    for what, (count, degree) in zip(("weights", "experts"), divided(model, kind, tp), strict=False):
        replicas, size = ranks // degree, count * model.element_bytes
        if replicas == 1 and model.element_bytes == GRADIENT_BYTES:
            continue
        # FSDP2 copies shards to what it sends, and what it gathered to the weights; those of one rank to the weights.
        copies = (2 * (1 + 1 / replicas) if replicas > 1 else 2) * size / hardware.device.bytes_per_second
        seconds = hardware.collective_seconds("all_gather", replicas, size, degree)
        found.append(_Gather(prefix + what, hardware.link_of(replicas, degree), seconds, copies))
    return found


def _gathered(
    ops: Sequence[tuple[Instruction, Op | None]], gathers: Sequence[Sequence[_Gather]], which: str
) -> list[tuple[Instruction, Op | None]]:
    """A pass with the all-gathers of each block's sharded weights, under the ops of the block before (FSDP)."""
    first: dict[int, int] = {}
    for at, (_, op) in enumerate(ops):
        if op is not None and op.kind in ("F", "D", "R", "B", "BF"):
            first.setdefault(op.block, at)
    order = sorted(first, key=lambda block: first[block])
    starts = {first[block]: following for block, following in pairwise(order)}
    label = f"block {{}} {which}".format
    found: list[tuple[Instruction, Op | None]] = []
    for at, each in enumerate(ops):
        if at == first[order[0]]:
            found += [start for gather in gathers[order[0]] for start in gather.start(label(order[0]))]
        block = -1 if each[1] is None else each[1].block
        if first.get(block) == at:
            found += [end for gather in gathers[block] for end in gather.end(label(block))]
        if at in starts:
            found += [start for gather in gathers[starts[at]] for start in gather.start(label(starts[at]))]
        found.append(each)
    return found


def _recomputes(op: Op | None) -> bool:
    return op is not None and (op.of or op.kind) in ("R", "RC")
