"""Gathering of blocks' sharded weights around a list of ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from torch import nn

from oases.core.execution.dtensors import stand_in_of
from oases.core.execution.executor import Handlers, Program, Step
from oases.core.execution.piece import BlockParameters, Leaves
from oases.core.schedule import Op

Put = Callable[[int], None]
"""Function that puts a block's stand-ins into its modules."""


class BlockUnit(Protocol):
    """Weights of one block that are sharded over data-parallel ranks, gathered and released together.

    names: of its parameters. computed: called when all gradients of a pass are there, where hooks cannot tell.
    """

    names: list[str]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Unsharded parameters by name, the same objects in every step."""

    @property
    def computed(self) -> Callable[[], None] | None:
        """Function to call when all gradients of a pass are there, where hooks cannot tell; or None."""

    def gather_ahead(self) -> None:
        """Start the gather, unless it was started."""

    def gather(self) -> None:
        """Wait until the unsharded weights are in the block."""

    def release(self) -> None:
        """Free the unsharded weights, unless they are to be kept."""


class UnitGatherer:
    """Gathers the units of a stack's blocks ahead of a list of ops, and releases each after its last op.

    units: by block.
    """

    def __init__(self, units: Sequence[BlockUnit]) -> None:
        self._units = units
        self._reads: Callable[[Op], Iterable[int]] = lambda op: ()
        self._left = Counter[int]()
        self._order: list[int] = []

    def around(self, handlers: Handlers, program: Program, put: Put) -> Handlers:
        """Wrap handlers to gather weights before an op and release them after; `put` follows each gather."""
        self._reads = program.reads

        def surrounded(handler: Callable[[Step], None]) -> Callable[[Step], None]:
            def run(step: Step) -> None:
                for block in self._reads(step.op):
                    self._have(block)
                    put(block)
                handler(step)
                for block in self._reads(step.op):
                    self._left[block] -= 1
                    if not self._left[block]:
                        self._units[block].release()

            return run

        return {key: surrounded(handler) for key, handler in handlers.items()}

    def begin(self, steps: Iterable[Step]) -> None:
        """Count the reads of each block in a list of steps."""
        reads = [block for step in steps for block in self._reads(step.op)]
        self._left, self._order = Counter(reads), list(dict.fromkeys(reads))

    def sharded(self, block: int) -> Collection[str]:
        """Names of a block's sharded parameters."""
        return self._units[block].names

    def forget(self) -> None:
        """Release all gathered weights after a failure."""
        self._left.clear()
        self._order.clear()
        for unit in self._units:
            unit.release()

    def _have(self, block: int) -> None:
        """Gather a block's weights, and start the gather of the next block."""
        self._units[block].gather()
        if block in self._order:
            self._order.remove(block)
            for following in self._order[:1]:
                self._units[following].gather_ahead()


def leaves_of(parameters: Sequence[BlockParameters], units: Sequence[BlockUnit]) -> list[Leaves]:
    """Stand-ins of each block's parameters, for sharded weights of the gathered ones."""
    if not units:
        return [Leaves([*map(stand_in_of, each.parameters)]) for each in parameters]
    return [Leaves(each.whole(unit.parameters)) for each, unit in zip(parameters, units, strict=True)]
