"""Replicated parts of a block, between two collectives: combine, prepare and prologue.

`combine` follows a block's sum. `prepare` is the half of `partial` in front of a gather. `prologue` is work of a
block that every rank does in full (an attention that cannot be sharded): the block's other methods get its result in
place of the block's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import CallInputs, SubBatches
from oases.core.blocks.program import BlockProgram
from oases.core.blocks.randomness import MethodName, Randomness
from oases.core.execution.executor import Place
from oases.core.execution.piece import Leaves, Piece, method_of, read_only, recorded, tensor_of

_NO_CHANGE = nullcontext()


class BetweenBlocks:
    """Pieces of one call between its blocks. whole: whether gradients there are equal on all ranks.

    Other arguments: as of `BlockWork`.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], program: BlockProgram, leaves: list[Leaves], randomness: Randomness,
        cut: SubBatches, inputs: CallInputs, *, differentiable: bool, whole: bool,
    ) -> None:  # fmt: skip
        self._program, self._leaves, self._randomness = program, leaves, randomness
        self._cut, self._inputs, self._differentiable, self._whole = cut, inputs, differentiable, whole
        self._methods: dict[tuple[str, int], Callable[..., Tensor]] = {}
        for name, of in (
            ("combine", [True] * len(blocks)), ("prepare", program.halved), ("prologue", program.prologues),
        ):  # fmt: skip
            self._methods |= {(name, b): method_of(block, name) for b, block in enumerate(blocks) if of[b]}
        self._pieces: dict[tuple[str, int, int], Piece] = {}
        self._before: dict[Place, Tensor] = {}
        """Inputs of prologues that are recomputed."""

    def run(self, name: MethodName, place: Place, given: tuple[Tensor, ...], *, again: bool, graph: bool) -> Tensor:
        """Run a method of a block on a sub-batch. again: in a recomputation."""
        block, s = place
        method, values = self._methods[name, block], self._inputs.values(block, s)

        def call() -> Tensor:
            if not graph:
                return tensor_of(method, *given, *values)
            out, self._pieces[name, block, s] = recorded(
                method, given, values, [self._leaves[block], *self._inputs.leaves], whole=self._whole
            )
            return out

        draw = self._randomness.again if again else self._randomness.run
        repeated = place in self._program.recomputed or place in self._program.combined_again
        with _NO_CHANGE if graph else torch.no_grad():
            if self._differentiable and repeated:
                return read_only(method, given, lambda: draw(name, block, s, self._cut.extent_between, call))
            return draw(name, block, s, self._cut.extent_between, call)

    def enter(self, place: Place, x: Tensor, *, again: bool, graph: bool) -> tuple[Tensor, Tensor]:
        """A block's input -> what its `combine` and what its `partial`, or a gather in front of that, are given."""
        if self._program.prologues[place[0]]:
            if graph and not again and place in self._program.recomputed and self._whole:
                self._before[place], graph = x, False  # of a part of a sequence the gathered result is kept
            h = self.run("prologue", place, (x,), again=again, graph=graph)
            return h, h
        if self._program.halved[place[0]]:
            return x, self.run("prepare", place, (x,), again=again, graph=graph)
        return x, x

    def keeps_input(self, place: Place) -> bool:
        """Whether the input of a prologue is kept, from which `entered_again` makes the input of `partial`."""
        return place in self._before

    def entered_again(self, place: Place) -> Tensor:
        """The result of a prologue, recomputed."""
        return self.run("prologue", place, (self._before.pop(place),), again=True, graph=True)

    def combined(self, place: Place, grad: Tensor) -> Sequence[Tensor | None]:
        """Gradient of a combined result -> those of the block's input and of its sum."""
        return self._pieces.pop(("combine", *place)).backward([grad])

    def total_gradient(self, place: Place, g: Tensor, residual: Tensor | None) -> Tensor:
        """Gradient of a block's input. g: through `partial`. residual: past it."""
        prologue = self._pieces.pop(("prologue", *place), None)
        piece = prologue or self._pieces.pop(("prepare", *place), None)
        if residual is not None and (prologue is not None or piece is None):
            g, residual = g.add_(residual), None
        if piece is None:
            return g
        (through,) = piece.backward([g])
        if through is None:
            name = "prepare" if prologue is None else "prologue"
            raise RuntimeError(f"block {place[0]}: {name}(x) does not depend on x; it must be differentiable in x")
        return through if residual is None else through + residual

    def clear(self) -> None:
        """Release every tensor."""
        self._pieces.clear()
        self._before.clear()
