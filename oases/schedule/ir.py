"""A schedule is data: the ops of one training step in issue order.

Compute ops work on one (block, sub-batch); collectives carry the result of one compute op. What an op needs
follows from the op itself, never from its place in the list, so one list can be validated, executed,
simulated and drawn. Block and sub-batch count from 0. Source: Oases (arXiv 2305.16121), section on scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Compute = Literal["F", "C", "R", "B", "W"]
"""F: forward of a block up to its row-parallel product; its result is a partial sum over the ranks.
C: combine the reduced result with the block's input (bias, dropout, residual): the next block's input.
R: F again, from the kept block input, because F kept nothing for the backward pass.
B: backward of C and F down to the block's input; its result is a partial sum over the ranks.
W: the weight gradients that B of this block left out. Without a W in the list B computes them itself."""

Collective = Literal["all_reduce", "wait"]
"""all_reduce: start summing the result of op `of` over the ranks, in place. wait: its end."""

COMPUTE: tuple[str, ...] = get_args(Compute)
COLLECTIVE: tuple[str, ...] = get_args(Collective)
BACKWARD: frozenset[str] = frozenset({"R", "B", "W"})


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

    @property
    def forward(self) -> tuple[Op, ...]:
        """The ops of the forward pass."""
        return tuple(op for op in self.ops if not op.in_backward)

    @property
    def backward(self) -> tuple[Op, ...]:
        """The ops of the backward pass, recomputation included."""
        return tuple(op for op in self.ops if op.in_backward)

    @property
    def collectives(self) -> tuple[Op, ...]:
        """The collectives, in the order in which every rank must issue them."""
        return tuple(op for op in self.ops if op.kind == "all_reduce")

    def all_reduces_per_layer(self) -> float:
        """All-reduces per transformer layer (two blocks) and sub-batch, counted from the list."""
        return 2 * len(self.collectives) / (self.num_blocks * self.num_sub_batches)
