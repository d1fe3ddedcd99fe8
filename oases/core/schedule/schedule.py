"""Schedule of one training step: its ops in issue order, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from oases.core.schedule.ops import STARTS, TRANSFERS, Op, Unit

Place = tuple[int, int]
"""(block, sub-batch); in a pipeline (model part, micro-batch)."""
Extent = Literal["none", "some", "full"]
Placement = Literal["loop", "v"]
"""Placement of model parts on pipeline stages, see `stage_of`."""
_AGAIN = ("R", "RC", "RD", "RE")


def stage_of(part: int, num_stages: int, placement: Placement) -> int:
    """Pipeline stage that has a model part: every placement of parts is defined here.

    loop: after the last stage parts go on with the first one. v: they turn around, so that two parts with nothing
    between them are on one stage, and with two parts a stage the first and the last part are on stage 0.
    """
    turn, place = divmod(part, num_stages)
    return num_stages - 1 - place if placement == "v" and turn % 2 else place


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

    def recomputes(self, stage: int) -> bool:
        """Whether a stage recomputes its forward passes."""
        return any(op.kind == "R" for op in self.stages[stage])
