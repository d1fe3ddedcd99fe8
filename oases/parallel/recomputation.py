"""Recomputation ahead of time: a stack's call computes again, before its gradient is there, what it did not keep."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from oases.parallel.execution import Execution


class Recomputation:
    """What some calls of stacks will compute again; a pipeline has it done while the gradient is on its way.

    executions: of the calls, in the order of the forward pass. Held weakly: the calls live as long as their graphs,
    so this keeps no tensor.
    """

    def __init__(self, executions: Iterable[Execution] = ()) -> None:
        self._executions = [ref(execution) for execution in executions]

    def __add__(self, other: Recomputation) -> Recomputation:
        """Both calls, this one first."""
        both = Recomputation()
        both._executions = self._executions + other._executions
        return both

    def recompute(self) -> None:
        """Run it now, the collectives that it sends among it; the backward pass then leaves it out.

        A second time, and once the backward pass is done, there is nothing left to do. All ranks of the stacks'
        groups must call it at the same point.
        """
        for held in reversed(self._executions):
            execution = held()
            if execution is not None:
                execution.recompute()
