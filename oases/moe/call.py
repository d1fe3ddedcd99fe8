"""Call of an ExpertStack: its gradients, returned block by block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oases.core.blocks.gathering import UnitGatherer
from oases.core.execution.call import ScheduledCall
from oases.core.execution.executor import Context
from oases.core.execution.failure import FailureMonitor
from oases.distributed.fsdp import FsdpUnit
from oases.moe.blocks import ExpertWork
from oases.moe.dispatch import RoutingError
from oases.moe.program import ExpertParameters, ExpertProgram


class ExpertCall(ScheduledCall):
    """Call of an ExpertStack; used by `apply_call` and by a pipeline."""

    RECOMPUTE = frozenset({"RN", "RE"})

    def __init__(
        self, program: ExpertProgram, work: ExpertWork, parameters: Sequence[ExpertParameters],
        units: Sequence[FsdpUnit], *, monitor: FailureMonitor | None, context: Context, differentiable: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            "ExpertStack", program, work, parameters, monitor=monitor, context=context,
            gathering=UnitGatherer(units) if units else None, differentiable=differentiable,
            unanimous=(RoutingError,),
        )  # fmt: skip
        self._blocks, self._units = work, units

    def entry_tensors(self) -> list[Tensor]:
        """Nothing: every parameter belongs to a block."""
        return []

    def block_tensors(self, block: int) -> list[Tensor]:
        """Parameters of a block that require gradients."""
        parameters = self._parameters[block]
        tensors = parameters.whole(self._units[block].parameters if self._units else None)
        return [tensors[number] for number in parameters.trained]

    def finish_block(self, block: int) -> list[Tensor | None]:
        """Run to the end of `block`; return the gradients of `block_tensors(block)`."""
        with self._together():
            self._run_to(self._ends[block])
            gradients = self._blocks.gradients_of(block)
            return [gradients[number] for number in self._parameters[block].trained]

    def finish(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the rest; return the gradient of the input."""
        with self._together():
            self._run_to(len(self._backward))
            return self._blocks.input_gradient(), []

    def defer_weights(self) -> None:
        """Nothing: expert schedules have no W op."""

    def compute_weights(self) -> None:
        """Nothing: no weight gradient was deferred."""
