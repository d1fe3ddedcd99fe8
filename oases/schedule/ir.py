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

Compute = Literal["F", "C", "R", "RC", "BC", "B", "W"]
"""F: forward of a block up to its row-parallel product; its result is a partial sum over the ranks.
C: combine the reduced result with the block's input (bias, dropout, residual): the next block's input.
R: F again, because F kept nothing for the backward pass. If no all_reduce carries its result, the row-parallel
product, whose output alone that would be, is left out.
RC: C again, from the result of R summed over the ranks, because C's result was not kept.
BC: backward of C alone, for lists in which something must happen between it and the backward of F.
B: backward of C (unless a BC did it) and F down to the block's input; its result is a partial sum over the ranks.
W: the weight gradients that B of this block left out. Without a W in the list B computes them itself."""

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "wait"]
"""all_reduce: start summing the result of op `of` over the ranks, in place. wait: its end, or that of another one.
With sequence parallelism, reduce_scatter: sum it, and leave each rank its part of the sequence; all_gather: join the
ranks' parts of what C, RC or BC made."""

Message = Literal["send", "receive"]
"""Of a pipeline: the result of F goes to the next stage, that of B to the one before. receive: stand still for it."""

Experts = Literal["N", "E", "P", "RE", "RN", "BE", "BN"]
"""Of lists of mixtures of experts (`schedule.experts`). N: what lies between the experts of the block before and
those of this one, router included. E: this rank's experts. P: where the next step's experts are computed. BE, BN:
backward; RE, RN: computed again for it."""

Transfer = Literal["all_to_all", "share", "join", "split", "return"]
"""Of the same. all_to_all: tokens, or their gradients, to whose experts and back. Trans is share, then join: a home
sends each holder of a copy its share of the parameters, and the holders exchange shares. Agg is split, then return:
holders add up each other's shares of the gradients, and send them home."""

COMPUTE: tuple[str, ...] = get_args(Compute)
COLLECTIVE: tuple[str, ...] = get_args(Collective)
STARTS: tuple[str, ...] = COLLECTIVE[:-1]
BACKWARD: frozenset[str] = frozenset({"R", "RC", "BC", "B", "W", "RE", "RN", "BE", "BN", "split", "return"})


class ScheduleError(ValueError):
    """A schedule that cannot run: the message names the op and its line."""


@dataclass(frozen=True)
class Op:
    """One line of a schedule. `of` names the op whose result a collective or a message carries, or a wait is for.

    In a pipeline's list `block` is the stage and `sub_batch` the micro-batch.
    """

    kind: Compute | Collective | Message | Experts | Transfer
    block: int
    sub_batch: int
    of: Compute | Experts | Transfer | None = None

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
    computes again up to the row-parallel product: no block ("none"), some, or every one ("full"). `along` says
    what sub-batches are parts of: the samples, or the tokens of a batch too small to cut. In the latter case the
    blocks in `joint` need every token at once: their F, R, B and W run once, as sub-batch 0, for all of them.
    """

    name: str
    num_blocks: int
    num_sub_batches: int
    ops: tuple[Op, ...]
    recompute: Literal["none", "some", "full"] = "none"
    along: Literal["batch", "sequence"] = "batch"
    joint: frozenset[int] = frozenset()

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def recomputed(self) -> frozenset[tuple[str, int, int]]:
        """(kind, block, sub-batch) of every R and RC: what the backward pass computes again."""
        return frozenset((op.kind, op.block, op.sub_batch) for op in self.ops if op.kind in ("R", "RC"))

    @cached_property
    def recomputed_blocks(self) -> frozenset[int]:
        """The blocks that are computed again."""
        return frozenset(block for kind, block, _ in self.recomputed if kind == "R")

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

    @cached_property
    def starts(self) -> dict[Op, Op]:
        """The collective that carries each compute op's result, by that op."""
        return {op.carried: op for op in self.collectives}

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether each rank holds its part of the sequence between the blocks."""
        return any(op.kind in ("reduce_scatter", "all_gather") for op in self.ops)

    @cached_property
    def collectives(self) -> tuple[Op, ...]:
        """The collectives, in the order in which every rank must issue them."""
        return tuple(op for op in self.ops if op.kind in STARTS)

    @cached_property
    def overlaps(self) -> bool:
        """Whether any compute runs between the start of an all-reduce and its wait."""
        flying: set[Op] = set()
        for op in self.ops:
            if op.kind in STARTS:
                flying.add(op.carried)
            elif op.kind == "wait":
                flying.discard(op.carried)
            elif flying and op.kind not in ("C", "RC", "BC"):
                return True
        return False

    def all_reduces_per_layer(self) -> float:
        """All-reduces per transformer layer (two blocks) and sub-batch, counted from the list.

        With sequence parallelism a reduce-scatter and an all-gather, which send as much, count as one.
        """
        halves = sum(2 if op.kind == "all_reduce" else 1 for op in self.collectives)
        return halves / (self.num_blocks * self.num_sub_batches)
