"""PlannedStack: the blocks of a plan's stage as overlapped stacks of different tensor-parallel degrees."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oases.core.blocks.stack import OverlappedStack
from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup, group_size
from oases.distributed.fsdp import FsdpUnit
from oases.distributed.mesh import Mesh
from oases.distributed.reshard import reshard
from oases.plans.plan import AUTO, Plan, Segment

BlockMaker = Callable[[int, ProcessGroup | None], nn.Module]
"""(number of the block in the model, tensor-parallel group) -> the block, sharded over that group."""


class NumberedBlocks(nn.Module):
    """Blocks named by their numbers in the model."""

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
    """Segment of a plan, the numbers of its blocks in the model, and the stack that runs it."""

    segment: Segment
    numbers: range
    stack: Any


class PlannedStack(nn.Module):
    """Blocks of one stage of a plan, each segment an `OverlappedStack` on its share of the samples.

    blocks: called once for each block of the stage, in order. mesh: the stage's (`Mesh.of(plan)`). stack_options:
    options of OverlappedStack that a plan does not have, such as wire_dtype, or that override it. Input: [local
    samples, ...], this rank's share at the first segment's degree, replicated over its tensor-parallel ranks; output:
    [local samples, ...] at the last segment's degree. A replica's loss is the mean over its samples; gradients are
    averaged by `GradientAverager(stack.parts())`. Parameter names (blocks.0, blocks.1, ...) are those of one
    OverlappedStack of the whole model, for every plan and stage.
    """

    def __init__(self, plan: Plan, blocks: BlockMaker, mesh: Mesh, **stack_options: Any) -> None:
        super().__init__()
        self.chunks = plan.parts_of(mesh.stage)
        """Parts of the model on this stage: one, or several in an interleaved pipeline."""
        self.mesh = mesh
        made: dict[int, nn.Module] = {}
        # In plain lists, so that parameter names do not depend on the plan and any plan can read the checkpoint.
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
        """Numbers in the model of the blocks of a segment that begins with block `first`."""
        return range(first, first + segment.num_blocks)

    def _stack(self, blocks: list[nn.Module], first: int, segment: Segment, options: dict[str, Any]) -> nn.Module:
        """Stack for the blocks of a segment. first: number of the first block."""
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
        """Stacks of all segments."""
        return [placed.stack for chunk in self._placed for placed in chunk]

    def forward(self, x: Tensor) -> Tensor:
        """[samples at the first degree, ...] -> [samples at the last degree, ...], through the whole stage."""
        for chunk in range(len(self.chunks)):
            x = self.run(x, chunk)
        return x

    def run(self, x: Tensor, chunk: int, context: Context | None = None) -> Tensor:
        """Run one part of this stage. context: for its stacks' calls."""
        part = self.chunks[chunk]
        degree = part.first_degree
        for segment, _, stack in self._placed[chunk]:
            x = stack(reshard(x, degree, segment.tp, self.mesh), context=context)
            degree = segment.tp
        return x

    @property
    def calls(self) -> int:
        """Number of forward passes, see `OverlappedStack.calls`."""
        return max(stack.calls for stack in self.segments)

    def at_call(self, number: int) -> None:
        """Set the number of forward passes of all segments, see `OverlappedStack.at_call`."""
        for stack in self.segments:
            stack.at_call(number)

    def _unshared(self, block: nn.Module) -> list[nn.Parameter]:
        """Parameters of a block that this rank holds alone."""
        return []

    def parts(self) -> Iterator[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Parameters and their data-parallel group, block by block."""
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

    def shard_weights(self, dtype: torch.dtype | None = None, *, keep: bool = False) -> list[FsdpUnit]:
        """Shard every weight over the ranks of `parts`; return a unit for each block that has replicas.

        dtype, keep: see `FsdpUnit`.
        """
        found: list[FsdpUnit] = []
        several = len(self.chunks) > 1
        placed = [(part.number, each) for part, of in zip(self.chunks, self._placed, strict=True) for each in of]
        for part, (segment, numbers, stack) in placed:
            group, gathering = self.mesh.data(segment.tp), self.mesh.weights(segment.tp)
            if group is not None and gathering is not None and group_size(group) > 1:
                blocks = {number: self.blocks[number] for number in numbers}
                units = [
                    FsdpUnit(
                        block,
                        group,
                        gathering,
                        f"block {number}",
                        self._unshared(block),
                        dtype=dtype,
                        keep=keep,
                        part=part if several else None,
                    )
                    for number, block in blocks.items()
                ]
                stack.shard(units)
                found += units
        return found

    def compile_blocks(self, **options: Any) -> None:
        """Compile the blocks of all segments, see `OverlappedStack.compile_blocks`."""
        for stack in self.segments:
            stack.compile_blocks(**options)

    def train(self, mode: bool = True) -> PlannedStack:
        """Set the training mode, also of the stacks, which are not submodules."""
        for stack in self.segments:
            stack.train(mode)
        super().train(mode)
        return self


def _options_of(segment: Segment) -> dict[str, Any]:
    """Options of a segment's OverlappedStack."""
    if segment.schedule != AUTO:
        return {"schedule": segment.generated()}
    again = segment.recomputed_layers
    every = 2 * again >= segment.num_blocks
    return {
        "schedule": AUTO, "sub_batches": segment.sub_batches or None, "recompute": again if again > 0 and not every
        else "full" if again else "none", "sequence_parallel": segment.sequence_parallel,
    }  # fmt: skip
