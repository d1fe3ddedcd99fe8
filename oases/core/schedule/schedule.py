"""Schedule of one training step: its ops in issue order, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal

from oases.core.schedule.ops import STARTS, TRANSFERS, Op, Unit

Place = tuple[int, int]
"""(block, sub-batch); in a pipeline (model part, micro-batch)."""
Extent = Literal["none", "some", "full"]
Placement = Literal["loop", "v"]
"""Placement of model parts on pipeline stages, see `stage_of`."""
Lane = Literal["to the next stage", "to the stage before", ""]
"""Lane of messages between stages; "" for none."""
_AGAIN = ("R", "RC", "RD", "RE")


def stage_of(part: int, num_stages: int, placement: Placement) -> int:
    """Pipeline stage that has a model part: every placement of parts is defined here.

    loop: after the last stage parts go on with the first one. v: they turn around, so that two parts with nothing
    between them are on one stage, and with two parts a stage the first and the last part are on stage 0.
    """
    turn, place = divmod(part, num_stages)
    return num_stages - 1 - place if placement == "v" and turn % 2 else place


def lane_of(part: int, of: Literal["F", "B"], num_stages: int, placement: Placement) -> Lane:
    """Lane that carries a part's activation (F) or gradient (B); "" where the part that reads it is on its stage."""
    reader = part + 1 if of == "F" else part - 1
    if stage_of(part, num_stages, placement) == stage_of(reader, num_stages, placement):
        return ""
    back = placement == "v" and part // num_stages % 2 == 1
    return "to the stage before" if (of == "B") != back else "to the next stage"


@dataclass(frozen=True)
class Schedule:
    """Ops of one forward and backward pass over `num_blocks` blocks, in issue order.

    Every rank of the group runs the same list; in a pipeline, every rank of a stage runs that stage's ops.
    unit: the units that are scheduled.
        block       tensor-parallel blocks. along: the dimension that sub-batches split, batch or sequence (if a
                    batch is too small). In the latter case the blocks in `joint` need every token at once:
                    their F, R, B and W run once, as sub-batch 0, for all sub-batches.
        experts     blocks of experts with the layers before and after them, D 0, E 0, F 0, D 1, ...; no sums
        stage       a pipeline: `num_blocks` model parts, each on the stage that `placement` says; sub-batches are
                    micro-batches. Ops are sorted by stage. Between parts of one stage there are no messages.
    recompute: blocks that the backward pass recomputes: "none", "some" or "full".
    """

    name: str
    num_blocks: int
    num_sub_batches: int
    ops: tuple[Op, ...]
    recompute: Extent = "none"
    along: Literal["batch", "sequence"] = "batch"
    joint: frozenset[int] = frozenset()
    unit: Unit = "block"
    num_stages: int = 1
    placement: Placement = "loop"

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    # --- any list ---

    @cached_property
    def recomputed(self) -> frozenset[tuple[str, int, int]]:
        """(kind, block, sub-batch) of every R, RC, RD and RE."""
        return frozenset((op.kind, op.block, op.sub_batch) for op in self.ops if op.kind in _AGAIN)

    @cached_property
    def recomputed_blocks(self) -> frozenset[int]:
        """Blocks that the backward pass recomputes."""
        return frozenset(block for kind, block, _ in self.recomputed if kind == "R")

    @cached_property
    def extent(self) -> Extent:
        """Extent of recomputation by the ops, which must equal `recompute`."""
        if self.unit == "stage":
            found, whole = len(self.recomputed), self.num_blocks * self.num_sub_batches
        elif self.unit == "experts":
            found, whole = len(self.recomputed), 3 * self.num_blocks
        else:
            found, whole = len(self.recomputed_blocks), self.num_blocks
        return "none" if not found else "full" if found == whole else "some"

    @cached_property
    def forward(self) -> tuple[Op, ...]:
        """Ops of the forward pass."""
        return tuple(op for op in self.ops if not op.in_backward)

    @cached_property
    def backward(self) -> tuple[Op, ...]:
        """Ops of the backward pass, with recomputation."""
        return tuple(op for op in self.ops if op.in_backward)

    @cached_property
    def backward_set(self) -> frozenset[Op]:
        """Ops of the backward pass as a set."""
        return frozenset(self.backward)

    @cached_property
    def lines(self) -> dict[Op, int]:
        """Line number of each op, from 1."""
        return {op: line for line, op in enumerate(self.ops, start=1)}

    @cached_property
    def collectives(self) -> tuple[Op, ...]:
        """Collectives, in the order in which every rank must issue them."""
        return tuple(op for op in self.ops if op.kind in STARTS)

    @cached_property
    def starts(self) -> dict[Op, Op]:
        """Collective by the op whose result it carries (`carried` of the collective and of its wait)."""
        return {op.carried: op for op in self.collectives if op.of is not None or op.kind in TRANSFERS}

    @cached_property
    def overlaps(self) -> bool:
        """Whether any compute runs between the start of a collective and its wait."""
        return len(self.exposed) < len(self.collectives)

    @cached_property
    def exposed(self) -> frozenset[Op]:
        """Collectives under which no compute runs before their wait."""
        exposed, flying = set(self.collectives), {}
        for op in self.ops:
            if op.kind in STARTS:
                flying[op.carried] = op
            elif op.kind == "wait":
                flying.pop(op.carried, None)
            elif op.kind not in ("C", "RC", "BC"):
                exposed.difference_update(flying.values())
        return frozenset(exposed)

    @cached_property
    def has_weight_passes(self) -> bool:
        """Whether weight gradients are ops of their own (W)."""
        return any(op.kind == "W" for op in self.ops)

    # --- tensor-parallel blocks ---

    @cached_property
    def recomputed_inputs(self) -> frozenset[Place]:
        """(block, sub-batch) whose input an RC recomputes before its R, so that the forward pass need not keep it."""
        made: set[Place] = set()
        recomputed: set[Place] = set()
        for op in self.ops:
            if op.kind == "RC":
                made.add((op.block + 1, op.sub_batch))
            elif op.kind == "R" and (op.block, op.sub_batch) in made:
                recomputed.add((op.block, op.sub_batch))
        return frozenset(recomputed)

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether each rank holds a shard of the sequence between blocks."""
        return any(op.kind in ("reduce_scatter", "all_gather") for op in self.ops)

    @cached_property
    def dispatched(self) -> frozenset[Place]:
        """(block, sub-batch) whose tokens are sent to experts by ops of the list, between D and E and after it."""
        return frozenset((op.block, op.sub_batch) for op in self.ops if op.kind == "D")

    def all_reduces_per_layer(self) -> float:
        """All-reduces per transformer layer (two blocks) and sub-batch.

        With sequence parallelism a reduce-scatter and an all-gather, which send as many bytes, count as one.
        """
        sums = [op for op in self.collectives if op.kind != "all_to_all"]
        halves = sum(2 if op.kind == "all_reduce" else 1 for op in sums)
        return halves / (self.num_blocks * self.num_sub_batches)

    # --- experts ---

    @cached_property
    def copies(self) -> bool:
        """Whether experts have replicas."""
        return any(op.kind == "share" for op in self.ops)

    # --- pipelines ---

    @property
    def chunks(self) -> int:
        """Model parts per stage."""
        return self.num_blocks // self.num_stages

    def stage_of(self, part: int) -> int:
        """Stage that has a model part."""
        return stage_of(part, self.num_stages, self.placement)

    @cached_property
    def stages(self) -> tuple[tuple[Op, ...], ...]:
        """Ops of each stage; every rank of a stage runs the same."""
        found: list[list[Op]] = [[] for _ in range(self.num_stages)]
        for op in self.ops:
            found[self.stage_of(op.block)].append(op)
        return tuple(map(tuple, found))

    @cached_property
    def readings(self) -> tuple[StageReading, ...]:
        """Properties of each stage that follow from its list."""
        return tuple(StageReading.of(ops) for ops in self.stages)

    def in_flight(self, stage: int) -> int:
        """Maximum number of micro-batches between forward and backward pass on a stage, over all its parts."""
        return self.readings[stage].in_flight

    def recomputes(self, stage: int) -> bool:
        """Whether a stage recomputes its forward passes."""
        return any(op.kind == "R" for op in self.stages[stage])


Pass = tuple[Literal["F", "R", "B", "W"], int, int]
"""Pass (F, B, R or W), model part and micro-batch. R: early recomputation; else it is part of the backward pass."""


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
