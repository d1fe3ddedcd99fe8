"""BlockProgram: the steps of a tensor-parallel schedule for the blocks of one stack."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from oases.core.blocks.fused_norm import joined_norms
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
        self.joined = joined_norms(schedule, blocks, device)
        """By block, whether its norm may be one op with `combine` of the previous block."""
        self.halved = [self.joined[b] or _is_halved(block, b, schedule) for b, block in enumerate(blocks)]
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
        joined = "".join(f"\njoined {number}" for number, each in enumerate(self.joined) if each)
        self.order = hash_of(format_schedule(schedule) + joined)
        """Hash of the ops, which every rank must run alike."""
        super().__init__(schedule, label, layer_of)

    def reads(self, op: Op) -> Sequence[int]:
        """Its own block, and the next one where its norm runs with this op."""
        if op.kind not in _READERS:
            return ()
        above = op.block + 1
        both = op.kind in _OF_NEXT and above < len(self.halved) and (self.halved[above] or self.prologues[above])
        return (op.block, above) if both else (op.block,)

    def makes_gradients(self, op: Op) -> Sequence[int]:
        """Its own block, and the next one where its norm runs in front of the gather."""
        if op.kind not in ("BC", "B", "W"):
            return ()
        # A norm in front of the gather gets its gradient with the backward pass of the block below.
        above = op.block + 1
        both = op.kind == "BC" and above < len(self.halved) and (self.halved[above] or self.prologues[above])
        return (op.block, above) if both else (op.block,)


def _places(schedule: Schedule, kind: str) -> frozenset[Place]:
    return frozenset((op.block, op.sub_batch) for op in schedule if op.kind == kind)


def _is_halved(block: nn.Module, number: int, schedule: Schedule) -> bool:
    """Whether a block runs in two halves under sequence parallelism, split at the gather.

    `prepare(x) -> h`, token by token (its norm), runs on this rank's part of the sequence, `product(h) -> y` on all
    of it. The first block gets the full input and runs `partial` on it, as do blocks without the two methods.
    """
    if not number or not schedule.sequence_parallel:
        return False
    return all(callable(getattr(block, name, None)) for name in ("prepare", "product"))
