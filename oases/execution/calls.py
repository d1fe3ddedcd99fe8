"""Calls of stacks in the hands of a pipeline: what each does when, besides its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from oases.execution.delivery import Call


class Calls:
    """Calls of stacks whose passes are split up: what they compute again, and their weight gradients.

    made: the calls, in the order of the forward pass. They are held weakly and live as long as their graphs, so this
    keeps no tensor; but for weight gradients that were put off, which it keeps until they are computed. All ranks of
    the stacks' groups must do the same at the same point.
    """

    def __init__(self, made: Iterable[Call] = ()) -> None:
        self._calls = [ref(call) for call in made]
        self._waiting: list[Call] = []

    def __add__(self, other: Calls) -> Calls:
        """The calls of both, before anything was put off; these first."""
        both = Calls()
        both._calls = self._calls + other._calls
        return both

    def recompute(self) -> None:
        """Compute again now, before the gradient is there, with the collectives that this sends.

        The backward pass then leaves it out. A second time, and once the backward pass is done, there is nothing
        left to do.
        """
        for _ in self.recomputing():
            pass

    def recomputing(self) -> Iterator[None]:
        """The same step by step, each taken when the next is asked for, and all before the backward pass."""
        for call in self._backwards():
            yield from call.execution.recomputing()

    def put_weights_off(self) -> None:
        """Before the backward pass: let it leave out the weight gradients that its W ops would compute."""
        self._waiting = self._backwards()
        for call in self._waiting:
            call.execution.put_weights_off()

    def compute_weights(self) -> None:
        """After a backward pass that left them out: add the weight gradients to those of the parameters."""
        for call in self._waiting:
            call.compute_weights()
        self._waiting = []

    def _backwards(self) -> list[Call]:
        return [call for held in reversed(self._calls) if (call := held()) is not None]
