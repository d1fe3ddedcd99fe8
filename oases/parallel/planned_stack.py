"""PlannedStack: the blocks of a plan's stage, chains of overlapped stacks of different tensor-parallel degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from oases.execution.executor import Context
from oases.execution.group import ProcessGroup, group_size
from oases.parallel.fsdp import Unit
from oases.parallel.mesh import Mesh
from oases.parallel.reshard import reshard
from oases.parallel.stack import OverlappedStack
from oases.plans.plan import Part, Plan

BlockMaker = Callable[[int, ProcessGroup | None], nn.Module]
"""(number of the block in the model, tensor-parallel group) -> the block, cut over that group."""


class PlannedStack(nn.Module):
    """The blocks that one stage of a plan has, each segment an `OverlappedStack` on as many samples as it has there.

    blocks: called once for each block of the stage, in their order. mesh: the stage's (`Mesh.of(plan)`).
    stack_options: those of OverlappedStack that no plan has, such as wire_dtype.
    Input: [local samples, ...], those of this rank at the first segment's degree, the same on its tensor-parallel
    ranks; output: [local samples, ...] at the last segment's degree. A replica's loss is the mean over its samples;
    gradients are averaged by `GradientAverage(stack.parts())`. Parameters are called blocks.0, blocks.1, ... whatever
    the plan and the stage, as in one OverlappedStack of the whole model.
    """

    def __init__(self, plan: Plan, blocks: BlockMaker, mesh: Mesh, **stack_options: Any) -> None:
        super().__init__()
        self.chunks = tuple(part for part in plan.parts if part.number % mesh.num_stages == mesh.stage)
        """The parts of the model that are run here: one, or several where a pipeline interleaves them."""
        self.mesh = mesh
        self.blocks = nn.ModuleDict()
        # In plain lists, so that the names of parameters tell nothing of the plan: any other reads the checkpoint.
        self._stacks = [list(self._stacks_of(part, blocks, stack_options)) for part in self.chunks]

    def _stacks_of(self, part: Part, blocks: BlockMaker, options: dict[str, Any]) -> Iterator[OverlappedStack]:
        first = part.first_block
        for segment in part.segments:
            group = self.mesh.tensor(segment.tp)
            made = {str(number): blocks(number, group) for number in range(first, first + segment.num_blocks)}
            self.blocks.update(made)
            stack = OverlappedStack(
                made.values(), process_group=group, first_block=first, replica=self.mesh.replica(segment.tp),
                **{**options, "schedule": segment.generated()},
            )  # fmt: skip
            first += segment.num_blocks
            yield stack

    @property
    def first_degree(self) -> int:
        """Tensor-parallel degree of the first segment."""
        return self.chunks[0].first_degree

    @property
    def last_degree(self) -> int:
        """Tensor-parallel degree of the last segment."""
        return self.chunks[-1].last_degree

    @property
    def segments(self) -> list[OverlappedStack]:
        """The stacks of all segments."""
        return [stack for stacks in self._stacks for stack in stacks]

    def forward(self, x: Tensor) -> Tensor:
        """[samples at the first degree, ...] -> [samples at the last degree, ...], through all that is here."""
        for chunk in range(len(self.chunks)):
            x = self.run(x, chunk)
        return x

    def run(self, x: Tensor, chunk: int, context: Context | None = None) -> Tensor:
        """Through one of the parts that are run here. context: that of its stacks' calls."""
        part = self.chunks[chunk]
        degree = part.first_degree
        for segment, stack in zip(part.segments, self._stacks[chunk], strict=True):
            x = stack(reshard(x, degree, segment.tp, self.mesh), context=context)
            degree = segment.tp
        return x

    @property
    def calls(self) -> int:
        """Forward passes so far, as `OverlappedStack.calls`."""
        return max(stack.calls for stack in self.segments)

    def at_call(self, number: int) -> None:
        """As `OverlappedStack.at_call`, of all segments."""
        for stack in self.segments:
            stack.at_call(number)

    def parts(self) -> Iterator[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Each segment's parameters and the ranks that hold the same ones."""
        for part, stacks in zip(self.chunks, self._stacks, strict=True):
            for segment, stack in zip(part.segments, stacks, strict=True):
                yield list(stack.parameters()), self.mesh.data(segment.tp)

    def shard_weights(self) -> list[Unit]:
        """Have the ranks of `parts` hold a shard of every weight; a unit for each block that has replicas."""
        found: list[Unit] = []
        for part, stacks in zip(self.chunks, self._stacks, strict=True):
            for segment, stack in zip(part.segments, stacks, strict=True):
                group, gathering = self.mesh.data(segment.tp), self.mesh.weights(segment.tp)
                if group is not None and gathering is not None and group_size(group) > 1:
                    numbers = range(stack.first_block, stack.first_block + segment.num_blocks)
                    units = [
                        Unit(block, group, gathering, f"block {number}")
                        for number, block in zip(numbers, stack.blocks, strict=True)
                    ]
                    stack.shard(units)
                    found += units
        return found

    def compile_blocks(self, **options: Any) -> None:
        """As `OverlappedStack.compile_blocks`, of all segments."""
        for stack in self.segments:
            stack.compile_blocks(**options)

    def train(self, mode: bool = True) -> PlannedStack:
        """Of the segments too, which are not registered."""
        for stack in self.segments:
            stack.train(mode)
        super().train(mode)
        return self
