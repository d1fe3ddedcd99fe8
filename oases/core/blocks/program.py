"""BlockProgram: the steps of a tensor-parallel schedule for the blocks of one stack."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from oases.core.blocks.randomness import hash_of
from oases.core.execution.executor import Place, Program
from oases.core.schedule import Op, Schedule, format_schedule

_OF_NEXT = ("C", "RC", "B", "BC")
"""Ops that run the next block's norm, or its backward pass, where that block is halved."""
_READERS = ("F", "R", "D", "E", "BF", "BE", *_OF_NEXT)


class BlockProgram(Program):
    """Steps of a tensor-parallel schedule for these blocks, with sets of the places of each kind of op.

    device: type of the device that the blocks are on.
    """

    def __init__(
        self, schedule: Schedule, blocks: Sequence[nn.Module], label: str, layer_of: Sequence[int] | None,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self.joined = _joined(schedule, blocks, device)
        """By block, its norm and `combine` of the previous block as one op, where `joined_with` makes one of them."""
        self.halved = [self.joined[b] is not None or _is_halved(block, b, schedule) for b, block in enumerate(blocks)]
        """By block, whether its norm runs with op C of the previous block, in front of the gather if there is one."""
        self.prologues = [number > 0 and getattr(block, "has_prologue", False) for number, block in enumerate(blocks)]
        """By block, whether work of it that every rank does in full runs with op C of the previous block."""
        self.recomputed: frozenset[Place] = _places(schedule, "R")
        self.combined_again: frozenset[Place] = _places(schedule, "RC")
        self.recomputed_inputs: frozenset[Place] = schedule.recomputed_inputs
        self.deferred: frozenset[Place] = _places(schedule, "W")
        """Places whose weight gradients an op W computes; elsewhere B does."""
        self.dispatched: frozenset[Place] = schedule.dispatched
        self.apart: frozenset[Place] = _places(schedule, "BC")
        self.gathered = frozenset((op.of, op.block, op.sub_batch) for op in schedule if op.kind == "all_gather")
        self.summed_again: frozenset[Place] = frozenset(
            (op.block, op.sub_batch) for op in schedule if op.of == "R" and op.kind != "wait"
        )
        joined = "".join(f"\njoined {number}" for number, each in enumerate(self.joined) if each is not None)
        self.order = hash_of(format_schedule(schedule) + joined)
        """Hash of the ops, which every rank must run alike."""
        super().__init__(schedule, label, layer_of)

    def reads(self, op: Op) -> Sequence[int]:
        """Its own block, and the next one where its norm runs with this op."""
        return self._blocks_of(op, _OF_NEXT) if op.kind in _READERS else ()

    def makes_gradients(self, op: Op) -> Sequence[int]:
        """Its own block, and the next one where its norm, in front of a gather, goes backward with this op."""
        return self._blocks_of(op, ("BC",)) if op.kind in ("BC", "B", "W") else ()

    def _blocks_of(self, op: Op, of_next: Sequence[str]) -> Sequence[int]:
        above = op.block + 1
        both = op.kind in of_next and above < len(self.halved) and (self.halved[above] or self.prologues[above])
        return (op.block, above) if both else (op.block,)


def _places(schedule: Schedule, kind: str) -> frozenset[Place]:
    return frozenset((op.block, op.sub_batch) for op in schedule if op.kind == kind)


def _joined(schedule: Schedule, blocks: Sequence[nn.Module], device: str) -> list[Any]:
    """By block, what replaces its norm and `combine` of the block below, equal on all ranks.

    A list without sequence parallelism must have no recomputation, which would keep x and h of a block, no ops of
    experts and no sub-batches of tokens.
    """
    fits = schedule.sequence_parallel or not (
        schedule.recomputed or schedule.dispatched or schedule.along == "sequence"
    )
    # The type's: a compiled block, which has the methods of the block inside of it, joins nothing.
    pairs = [(below, above, getattr(type(above), "joined_with", None)) for below, above in itertools.pairwise(blocks)]
    return [None, *(join(above, below, device) if fits and join else None for below, above, join in pairs)]


def _is_halved(block: nn.Module, number: int, schedule: Schedule) -> bool:
    """Whether a block runs in two halves under sequence parallelism, split at the gather.

    `prepare(x) -> h`, token by token (its norm), runs on this rank's part of the sequence, `product(h) -> y` on all
    of it. The first block gets the full input and runs `partial` on it, as do blocks without the two methods.
    """
    if not number or not schedule.sequence_parallel:
        return False
    return all(callable(getattr(block, name, None)) for name in ("prepare", "product"))
