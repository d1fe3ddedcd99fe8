"""PlannedStack: the blocks of a plan's stage, a chain of overlapped stacks of different tensor-parallel degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from oases.parallel.group import ProcessGroup
from oases.parallel.mesh import Mesh
from oases.parallel.reshard import reshard
from oases.parallel.stack import OverlappedStack
from oases.planner.plan import Plan

BlockMaker = Callable[[int, ProcessGroup | None], nn.Module]
"""(number of the block in the model, tensor-parallel group) -> the block, cut over that group."""


class PlannedStack(nn.Module):
    """The blocks of a plan with one stage, each segment an `OverlappedStack` on as many samples as it has there.

    blocks: called once for each block, in their order. mesh: made for this plan (`Mesh.of(plan)`).
    stack_options: those of OverlappedStack that no plan has, such as wire_dtype.
    Input: [local samples, ...], those of this rank at the first segment's degree, the same on its tensor-parallel
    ranks; output: [local samples, ...] at the last segment's degree. A replica's loss is the mean over its samples;
    gradients are averaged by `GradientAverage(stack.parts())`. Parameters are called blocks.0, blocks.1, ... whatever
    the plan, as in one OverlappedStack.
    """

    def __init__(self, plan: Plan, blocks: BlockMaker, mesh: Mesh, **stack_options: Any) -> None:
        super().__init__()
        self.plan_segments = plan.stages[0].segments
        self.mesh = mesh
        self.blocks = nn.ModuleList()
        # In a plain list, so that the names of parameters tell nothing of the plan: any other reads the checkpoint.
        self.segments: list[OverlappedStack] = []
        for segment in self.plan_segments:
            group, first = mesh.tensor(segment.tp), len(self.blocks)
            made = [blocks(first + place, group) for place in range(segment.num_blocks)]
            self.blocks.extend(made)
            options = {**stack_options, "schedule": segment.generated()}
            stack = OverlappedStack(made, process_group=group, **options)
            stack.first_block, stack.replica = first, mesh.replica(segment.tp)
            self.segments.append(stack)

    @property
    def first_degree(self) -> int:
        """Tensor-parallel degree of the first segment."""
        return self.plan_segments[0].tp

    @property
    def last_degree(self) -> int:
        """Tensor-parallel degree of the last segment."""
        return self.plan_segments[-1].tp

    def forward(self, x: Tensor) -> Tensor:
        """[samples at the first degree, ...] -> [samples at the last degree, ...]."""
        degree = self.first_degree
        for segment, stack in zip(self.plan_segments, self.segments, strict=True):
            x = stack(reshard(x, degree, segment.tp, self.mesh))
            degree = segment.tp
        return x

    @property
    def calls(self) -> int:
        """Forward passes so far, as `OverlappedStack.calls`."""
        return max(stack.calls for stack in self.segments)

    @calls.setter
    def calls(self, calls: int) -> None:
        for stack in self.segments:
            stack.calls = calls

    def parts(self) -> Iterator[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Each segment's parameters and the ranks that hold the same ones."""
        for segment, stack in zip(self.plan_segments, self.segments, strict=True):
            yield list(stack.parameters()), self.mesh.data(segment.tp)

    def train(self, mode: bool = True) -> PlannedStack:
        """Of the segments too, which are not registered."""
        for stack in self.segments:
            stack.train(mode)
        super().train(mode)
        return self
