"""Handles by which a pipeline recomputes a stack's call early or defers its weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import ref


class Splittable(Protocol):
    """A call of a stack whose backward pass can be split."""

    def recompute(self) -> None:
        """Compute again now, before the gradient is there; the backward pass then leaves it out."""

    def defer_weights(self) -> None:
        """Before the backward pass: let it leave out the weight gradients that its W ops would compute."""

    def compute_weights(self) -> None:
        """After such a backward pass: add the weight gradients to those of the parameters."""


class Calls:
    """Calls of stacks whose passes are split up: what they recompute, and their weight gradients.

    They are held weakly and live as long as their graphs, so this keeps no tensor; but for weight gradients that were
    deferred, which it keeps until they are computed. All ranks of the stacks' groups must do the same at the same
    point.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], Splittable | None]] = []
        self._waiting: list[Splittable] = []

    def add(self, call: Splittable) -> None:
        """A call that was made, in the order of the forward pass."""
        self._calls.append(ref(call))

    def recompute(self) -> None:
        """Compute again now, with the collectives that this sends. A second time there is nothing left to do."""
        for call in self._backwards():
            call.recompute()

    def defer_weights(self) -> None:
        """Before the backward pass: let it leave out the weight gradients that its W ops would compute."""
        self._waiting = self._backwards()
        for call in self._waiting:
            call.defer_weights()

    def compute_weights(self) -> None:
        """After a backward pass that left them out: add the weight gradients to those of the parameters."""
        for call in self._waiting:
            call.compute_weights()
        self._waiting = []

    def _backwards(self) -> list[Splittable]:
        return [call for held in reversed(self._calls) if (call := held()) is not None]
