"""Segments of a plan as instructions: the passes of one stack, with the gathers of sharded weights (FSDP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from oases.plans.layered import Model
from oases.plans.plan import Segment
from oases.schedule import Op, Schedule, exchanging
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
            sizes = [model.block_parameters(kind, segment.tp) * model.element_bytes for kind in kinds]
            seconds = [hardware.collective_seconds("all_gather", replicas, size, segment.tp) for size in sizes]
            link = hardware.link_of(replicas, segment.tp)
            # FSDP2 copies shards to what it sends, and what it gathered to the weights.
            copies = [2 * (1 + 1 / replicas) * size / hardware.device.bytes_per_second for size in sizes]
            forward = _gathered(forward, seconds, copies, link, prefix, "forward")
            rest = _gathered(rest, seconds, copies, link, prefix, "backward")
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


def _gathered(
    ops: Sequence[tuple[Instruction, Op | None]],
    seconds: Sequence[float],
    copies: Sequence[float],
    link: str,
    prefix: str,
    which: str,
) -> list[tuple[Instruction, Op | None]]:
    """A pass with the all-gather of each block's sharded weights, under the ops of the block before (FSDP)."""
    first: dict[int, int] = {}
    for at, (_, op) in enumerate(ops):
        if op is not None and op.kind in ("F", "R", "B"):
            first.setdefault(op.block, at)
    order = sorted(first, key=lambda block: first[block])
    starts = {first[block]: following for block, following in pairwise(order)}
    found: list[tuple[Instruction, Op | None]] = []

    def name(block: int) -> str:
        return f"{prefix}weights of block {block} {which}"

    for at, each in enumerate(ops):
        if at == first[order[0]]:
            found.append((Start(name(order[0]), link, seconds[order[0]]), None))
        if each[1] is not None and first.get(each[1].block) == at:
            found.append((Wait(name(each[1].block)), None))
            found.append((Compute(f"copy of {name(each[1].block)}", copies[each[1].block]), None))
        if at in starts:
            found.append((Start(name(starts[at]), link, seconds[starts[at]]), None))
        found.append(each)
    return found


def _recomputes(op: Op | None) -> bool:
    return op is not None and (op.of or op.kind) in ("R", "RC")
