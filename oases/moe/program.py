"""Blocks of experts as a schedule sees them: their methods, the steps of a list over them, and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from oases.execution.executor import Program
from oases.execution.piece import BlockParameters
from oases.moe.layer import OverlappedMoE
from oases.schedule import Op


class ExpertBlock(Protocol):
    """A block of a stack of experts: its layers in front of the experts, and behind.

    before(x) -> (x, h): h is the input of the experts; x goes past them. after(x, y) -> the block's output, y the
    experts' output for h. Shapes: [..., hidden], y as h.
    """

    experts: OverlappedMoE

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See above."""

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """See above."""


class ExpertProgram(Program):
    """The steps of a schedule of experts. N b, E b and, behind the experts, N b + 1 read block b's parameters."""

    def reads(self, op: Op) -> Sequence[int]:
        """The block in front of the experts and the one behind them; the experts' own are never sharded."""
        if op.kind not in ("N", "RN", "BN"):
            return ()
        return [block for block in (op.block, op.block - 1) if 0 <= block < self.schedule.num_blocks]

    def makes_gradients(self, op: Op) -> Sequence[int]:
        """Those of both blocks that N lies between; of experts once their copies' gradients are at home."""
        if op.kind == "BN":
            return [block for block in (op.block, op.block - 1) if 0 <= block < self.schedule.num_blocks]
        return (op.block,) if op.kind == "BE" or (op.kind == "wait" and op.of == "return") else ()


class ExpertParameters(BlockParameters):
    """A block's parameters, and the numbers of those of its experts, in the order of their `weights`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        layer: OverlappedMoE = block.experts  # type: ignore[assignment]
        self.experts = [numbers[id(weight)] for weight in layer.experts.weights.given]
