"""PlannedStack: the blocks of a plan's stage, chains of overlapped stacks of different tensor-parallel degrees."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from oases.execution.executor import Context
from oases.execution.group import ProcessGroup, group_size
from oases.parallel.fsdp import FsdpUnit
from oases.parallel.mesh import Mesh
from oases.parallel.reshard import reshard
from oases.parallel.stack import OverlappedStack
from oases.plans.plan import AUTO, Plan, Segment

BlockMaker = Callable[[int, ProcessGroup | None], nn.Module]
"""(number of the block in the model, tensor-parallel group) -> the block, cut over that group."""


class NumberedBlocks(nn.Module):
    """Blocks by their numbers in the model, which are their names."""

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)

    def __getitem__(self, number: int) -> nn.Module:
        return self.get_submodule(str(number))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self._modules)


class _PlacedSegment(NamedTuple):
    """A segment, its modules' numbers in the model, and what runs it."""

    segment: Segment
    numbers: range
    stack: Any


class PlannedStack(nn.Module):
    """The blocks that one stage of a plan has, each segment an `OverlappedStack` on as many samples as it has there.

    blocks: called once for each block of the stage, in their order. mesh: the stage's (`Mesh.of(plan)`).
    stack_options: those of OverlappedStack that no plan has, such as wire_dtype, or in place of what the plan says.
    Input: [local samples, ...], those of this rank at the first segment's degree, the same on its tensor-parallel
    ranks; output: [local samples, ...] at the last segment's degree. A replica's loss is the mean over its samples;
    gradients are averaged by `GradientAverager(stack.parts())`. Parameter names (blocks.0, blocks.1, ...) are those
    of one OverlappedStack of the whole model, for every plan and stage.
    """

    def __init__(self, plan: Plan, blocks: BlockMaker, mesh: Mesh, **stack_options: Any) -> None:
        super().__init__()
        self.chunks = plan.parts_of(mesh.stage)
        """The parts of the model that are run here: one, or several where a pipeline interleaves them."""
        self.mesh = mesh
        made: dict[int, nn.Module] = {}
        # In plain lists, so that the names of parameters tell nothing of the plan: any other reads the checkpoint.
        self._placed: list[list[_PlacedSegment]] = []
        for part in self.chunks:
            self._placed.append([])
            first = part.first_block
            for segment in part.segments:
                numbers, group = self._numbers(first, segment), mesh.tensor(segment.tp)
                made |= {number: blocks(number, group) for number in numbers}
                stack = self._stack([made[number] for number in numbers], first, segment, stack_options)
                self._placed[-1].append(_PlacedSegment(segment, numbers, stack))
                first += segment.num_blocks
        self.blocks = NumberedBlocks(made)

    def _numbers(self, first: int, segment: Segment) -> range:
        """The modules of a segment that begins with block `first`, by their numbers in the model."""
        return range(first, first + segment.num_blocks)

    def _stack(self, blocks: list[nn.Module], first: int, segment: Segment, options: dict[str, Any]) -> nn.Module:
        """What runs the blocks of a segment. first: the number of the first one."""
        return OverlappedStack(
            blocks, process_group=self.mesh.tensor(segment.tp), first_block=first,
            replica=self.mesh.replica(segment.tp), **{**_options_of(segment), **options},
        )  # fmt: skip

    @property
    def first_degree(self) -> int:
        """Tensor-parallel degree of the first segment."""
        return self.chunks[0].first_degree

    @property
    def last_degree(self) -> int:
        """Tensor-parallel degree of the last segment."""
        return self.chunks[-1].last_degree

    @property
    def segments(self) -> list[Any]:
        """The stacks of all segments."""
        return [placed.stack for chunk in self._placed for placed in chunk]

    def forward(self, x: Tensor) -> Tensor:
        """[samples at the first degree, ...] -> [samples at the last degree, ...], through all that is here."""
        for chunk in range(len(self.chunks)):
            x = self.run(x, chunk)
        return x

    def run(self, x: Tensor, chunk: int, context: Context | None = None) -> Tensor:
        """Through one of the parts that are run here. context: that of its stacks' calls."""
        part = self.chunks[chunk]
        degree = part.first_degree
        for segment, _, stack in self._placed[chunk]:
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

    def _unshared(self, block: nn.Module) -> list[nn.Parameter]:
        """Parameters of a block that this rank holds alone."""
        return []

    def parts(self) -> Iterator[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Parameters and the ranks that hold the same ones, block by block."""
        for segment, numbers, _ in itertools.chain.from_iterable(self._placed):
            for number in numbers:
                unshared = self._unshared(self.blocks[number])
                apart = set(unshared)
                yield (
                    [each for each in self.blocks[number].parameters() if each not in apart],
                    self.mesh.data(segment.tp),
                )
                if unshared:
                    yield unshared, None

    def shard_weights(self) -> list[FsdpUnit]:
        """Have the ranks of `parts` hold a shard of every weight; a unit for each block that has replicas."""
        found: list[FsdpUnit] = []
        for segment, numbers, stack in itertools.chain.from_iterable(self._placed):
            group, gathering = self.mesh.data(segment.tp), self.mesh.weights(segment.tp)
            if group is not None and gathering is not None and group_size(group) > 1:
                blocks = {number: self.blocks[number] for number in numbers}
                units = [
                    FsdpUnit(block, group, gathering, f"block {number}", others=self._unshared(block))
                    for number, block in blocks.items()
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


def _options_of(segment: Segment) -> dict[str, Any]:
    """What a segment says of its OverlappedStack."""
    if segment.schedule != AUTO:
        return {"schedule": segment.generated()}
    again = segment.recomputed_layers
    every = 2 * again >= segment.num_blocks
    return {
        "schedule": AUTO, "sub_batches": AUTO, "recompute": again if again > 0 and not every else "full" if again
        else "none", "sequence_parallel": segment.sequence_parallel,
    }  # fmt: skip
