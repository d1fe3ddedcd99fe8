"""Turns schedules of experts into programs of one rank, whose every op takes as long as on the slowest rank.

All ranks wait for one another at every all-to-all, so the slowest one of each op sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from oases.schedule import Op, Schedule
from oases.simulator.program import Compute, Instruction, Program, Start, Wait

_LINK = "experts"


@dataclass(frozen=True)
class ExpertSeconds:
    """What a block of experts takes, and the N in front of it, in seconds.

    non_expert, experts: forward. backward: of both, in forward passes. all_to_all: tokens' way, one of four. share,
    join: of the copies' parameters; their gradients take as long in split and return. search: for a placement.
    ValueError for what is negative.
    """

    non_expert: float
    experts: float
    all_to_all: float
    share: float = 0.0
    join: float = 0.0
    search: float = 0.0
    backward: float = 2.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) >= 0:
                raise ValueError(f"{item.name} must be at least 0 seconds, got {getattr(self, item.name)}")

    def of(self, op: Op) -> float:
        """Seconds of a compute op or a collective of this block."""
        return {
            "N": self.non_expert, "RN": self.non_expert, "BN": self.backward * self.non_expert,
            "E": self.experts, "RE": self.experts, "BE": self.backward * self.experts, "P": self.search,
            "all_to_all": self.all_to_all, "share": self.share, "join": self.join, "split": self.join,
            "return": self.share,
        }[op.kind]  # fmt: skip


def lower_experts(schedule: Schedule, blocks: Sequence[ExpertSeconds], behind: float = 0.0) -> Program:
    """One step. blocks: of the experts, in order. behind: forward pass of the N behind the last of them.

    ValueError for a number of blocks that is not the schedule's.
    """
    if len(blocks) != schedule.num_blocks:
        raise ValueError(f"{schedule.name} has {schedule.num_blocks} blocks of experts, got seconds of {len(blocks)}")
    last = ExpertSeconds(behind, 0.0, blocks[-1].all_to_all, backward=blocks[-1].backward)

    def lowered(op: Op) -> Instruction:
        if op.kind == "wait":
            return Wait(str(schedule.starts[op.carried]))
        block = (*blocks, last)[op.block]
        if op.of == "BN":  # the gradients of what the block before sent
            block = blocks[op.block - 1]
        seconds = block.of(op)
        return Start(str(op), _LINK, seconds) if op in carriers else Compute(str(op), seconds)

    carriers = set(schedule.collectives)
    return Program(schedule.name, (tuple(map(lowered, schedule)),))
