"""A schedule is data: the ops of one training step in issue order.

Compute ops work on one (block, sub-batch); collectives carry the result of one compute op. What an op needs
follows from the op itself, never from its place in the list, so one list can be validated, executed,
simulated and drawn. Block and sub-batch count from 0. Source: Oases (arXiv 2305.16121), section on scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

Compute = Literal["F", "C", "R", "RC", "B", "W"]
"""F: forward of a block up to its row-parallel product; its result is a partial sum over the ranks.
C: combine the reduced result with the block's input (bias, dropout, residual): the next block's input.
R: F again, because F kept nothing for the backward pass. If no all_reduce carries its result, the row-parallel
product, whose output alone that would be, is left out.
RC: C again, from the result of R summed over the ranks, because C's result was not kept.
B: backward of C and F down to the block's input; its result is a partial sum over the ranks.
W: the weight gradients that B of this block left out. Without a W in the list B computes them itself."""

Collective = Literal["all_reduce", "wait"]
"""all_reduce: start summing the result of op `of` over the ranks, in place. wait: its end."""

COMPUTE: tuple[str, ...] = get_args(Compute)
COLLECTIVE: tuple[str, ...] = get_args(Collective)
BACKWARD: frozenset[str] = frozenset({"R", "RC", "B", "W"})


class ScheduleError(ValueError):
    """A schedule that cannot run: the message names the op and its line."""


@dataclass(frozen=True)
class Op:
    """One line of a schedule. `of` names the compute op whose result a collective carries."""

    kind: Compute | Collective
    block: int
    sub_batch: int
    of: Compute | None = None

    def __str__(self) -> str:
        head = self.kind if self.of is None else f"{self.kind} {self.of}"
        return f"{head} {self.block}.{self.sub_batch}"

    @property
    def carried(self) -> Op:
        """The compute op whose result this collective carries."""
        assert self.of is not None, f"{self} is not a collective"
        return Op(self.of, self.block, self.sub_batch)

    @property
    def in_backward(self) -> bool:
        """Whether the op belongs to the backward pass."""
        return (self.of or self.kind) in BACKWARD


@dataclass(frozen=True)
class Schedule:
    """The ops of one forward and backward pass over `num_blocks` blocks, in issue order.

    Every rank of the tensor-parallel group runs the same list. `recompute` says what the backward pass
    computes again: "none", or "full" for every block up to its row-parallel product.
    """

    name: str
    num_blocks: int
    num_sub_batches: int
    ops: tuple[Op, ...]
    recompute: Literal["none", "full"] = "none"

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def recomputed(self) -> frozenset[tuple[str, int, int]]:
        """(kind, block, sub-batch) of every R and RC: what the backward pass computes again."""
        return frozenset((op.kind, op.block, op.sub_batch) for op in self.ops if op.kind in ("R", "RC"))

    @cached_property
    def remade_inputs(self) -> frozenset[tuple[int, int]]:
        """(block, sub-batch) whose input an RC makes again before R needs it: the forward pass need not keep it."""
        made: set[tuple[int, int]] = set()
        remade: set[tuple[int, int]] = set()
        for op in self.ops:
            if op.kind == "RC":
                made.add((op.block + 1, op.sub_batch))
            elif op.kind == "R" and (op.block, op.sub_batch) in made:
                remade.add((op.block, op.sub_batch))
        return frozenset(remade)

    @cached_property
    def forward(self) -> tuple[Op, ...]:
        """The ops of the forward pass."""
        return tuple(op for op in self.ops if not op.in_backward)

    @cached_property
    def backward(self) -> tuple[Op, ...]:
        """The ops of the backward pass, recomputation included."""
        return tuple(op for op in self.ops if op.in_backward)

    @cached_property
    def lines(self) -> dict[Op, int]:
        """Where each op stands, counted from 1."""
        return {op: line for line, op in enumerate(self.ops, start=1)}

    @cached_property
    def backward_set(self) -> frozenset[Op]:
        """The ops of the backward pass, without their order."""
        return frozenset(self.backward)

    @property
    def collectives(self) -> tuple[Op, ...]:
        """The collectives, in the order in which every rank must issue them."""
        return tuple(op for op in self.ops if op.kind == "all_reduce")

    @cached_property
    def overlaps(self) -> bool:
        """Whether any compute runs between the start of an all-reduce and its wait."""
        flying: set[Op] = set()
        for op in self.ops:
            if op.kind == "all_reduce":
                flying.add(op.carried)
            elif op.kind == "wait":
                flying.discard(op.carried)
            elif flying and op.kind != "C":
                return True
        return False

    def all_reduces_per_layer(self) -> float:
        """All-reduces per transformer layer (two blocks) and sub-batch, counted from the list."""
        return 2 * len(self.collectives) / (self.num_blocks * self.num_sub_batches)
