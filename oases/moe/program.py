"""Interface of blocks of experts, the steps of a schedule over them, and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from oases.core.execution.executor import Program
from oases.core.execution.piece import BlockParameters
from oases.core.schedule import Op
from oases.moe.layer import OverlappedMoE


class ExpertBlock(Protocol):
    """Block of an ExpertStack: layers before the experts and after them.

    before(x) -> (x, h): h is the input of the experts; x bypasses them. after(x, y) -> the block's output, y the
    experts' output for h. Shapes: [..., hidden], y as h.
    """

    experts: OverlappedMoE

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See above."""

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """See above."""


class ExpertProgram(Program):
    """Steps of an expert schedule. N b, E b and, after the experts, N b + 1 read block b's parameters."""

    def reads(self, op: Op) -> Sequence[int]:
        """The blocks before and after N; experts are never FSDP-sharded."""
        if op.kind not in ("N", "RN", "BN"):
            return ()
        return [block for block in (op.block, op.block - 1) if 0 <= block < self.schedule.num_blocks]

    def makes_gradients(self, op: Op) -> Sequence[int]:
        """Both blocks around N; the experts' once their replicas' gradients are at the owner."""
        if op.kind == "BN":
            return [block for block in (op.block, op.block - 1) if 0 <= block < self.schedule.num_blocks]
        return (op.block,) if op.kind == "BE" or (op.kind == "wait" and op.of == "return") else ()


class ExpertParameters(BlockParameters):
    """Parameters of a block, with the indices of its experts' weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        layer: OverlappedMoE = block.experts  # type: ignore[assignment]
        self.experts = [numbers[id(weight)] for weight in layer.experts.weights.given]
