"""Routing state of open forward passes, so that recomputation uses the same bias and placement.

Router bias and placement change from step to step. Recomputation in the backward pass must not see new ones: it would
send tokens elsewhere. Both therefore stay while a forward pass is open, that is, until its backward pass or that of a
later one has begun: they change at the first forward pass of a training step, for any number of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oases.core.execution import failure
from oases.core.execution.call import refuse_second_derivatives
from oases.core.execution.failure import FailureMonitor, monitor_of, watch_backward
from oases.core.execution.group import ProcessGroup, group_of
from oases.moe.dispatch import RoutingError
from oases.moe.placement import Integers, Placement

MOST_OPEN = 64
"""Maximum number of open passes; beyond it the oldest are assumed to have no backward pass."""


def is_recomputation() -> bool:
    """Whether the current call is a recomputation in a backward pass, as by torch.utils.checkpoint."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, eq=False)
class RoutingState:
    """State that may change between steps. bias: a copy of the router's, None where it has none."""

    placement: Placement
    bias: Tensor | None


@dataclass(eq=False)
class ForwardPass:
    """Training pass. counts: [expert, device], once known. done: completed."""

    setting: RoutingState
    counts: Integers | None = None
    done: bool = False
    closed: bool = False


class OpenPasses:
    """Open passes of one layer."""

    def __init__(self) -> None:
        self._open: list[ForwardPass] = []

    def all_closed(self) -> bool:
        """Whether the state may change, asked before a pass is opened.

        Equal on every rank, unless one has failed: it follows from the order of calls alone.
        """
        # Backward passes come in the order of the forward passes, or all before the next one. So a pass before one
        # that is closed has no backward pass, as a forward pass to warm up, or of a step that was skipped.
        closed = max((number for number, each in enumerate(self._open) if each.closed), default=-1)
        self._open = [each for each in self._open[closed + 1 :] if each.done]
        if len(self._open) < MOST_OPEN:
            return not self._open
        del self._open[0]
        return True

    def open(self, setting: RoutingState) -> ForwardPass:
        """Begin a forward pass."""
        self._open.append(ForwardPass(setting))
        return self._open[-1]

    def newest(self) -> ForwardPass | None:
        """Last pass whose backward pass has not begun, where a recomputation does not know its counts yet."""
        return next((each for each in reversed(self._open) if each.done and not each.closed), None)

    def settings(self) -> list[RoutingState]:
        """Distinct states of the open passes, one of which a recomputation has; nearly always one."""
        found: list[RoutingState] = []
        for each in self._open:
            if each.counts is not None and each.setting not in found:
                found.append(each.setting)
        return found

    def find(self, settings: list[RoutingState], candidates: Integers, label: str) -> tuple[int, ForwardPass]:
        """Find the pass that is recomputed: (index of its state, pass). candidates: counts under each state.

        RoutingError where none had such counts.
        """
        for each in sorted(self._open, key=lambda each: each.closed):  # of two equal passes each is found once
            if each.counts is not None:
                index = settings.index(each.setting)
                if np.array_equal(each.counts, candidates[index]):
                    return index, each
        raise RoutingError(
            f"{label}: a recomputation sends tokens to other experts than its forward pass did. Layers before "
            "the router must be deterministic: keep the random state (preserve_rng_state=True), and use "
            "deterministic kernels"
        )


def begin_call(group: ProcessGroup | None, label: str, x: Tensor, *, training: bool) -> FailureMonitor | None:
    """Begin a call of a layer or stack; return the failure monitor, None for one rank.

    UsageError or FailedRankError, on all ranks, where their calls differ in more than the number of tokens.
    """
    monitor = monitor_of(group)
    if monitor is None:
        return None
    monitor.check()
    if not is_recomputation():  # under activation checkpointing its mode is another than that of the forward pass
        gradients = torch.is_grad_enabled()
        form = (
            "type of the input", x.dtype, "computation of gradients", gradients, "training mode", training,
            "gradient of the input", gradients and x.requires_grad,
        )  # fmt: skip
        failure.begin_call(group, label, form)
    return monitor


class _Closing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, each: ForwardPass | None, label: str, group: str) -> Tensor:
        ctx.each, ctx.label, ctx.group, ctx.has_run = each, label, group, False
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        refuse_second_derivatives(ctx.label)
        if ctx.has_run:
            raise RuntimeError(
                f"the backward pass of this call of {ctx.label} has run already; call the layer again for a second "
                "backward pass"
            )
        ctx.has_run = True
        watch_backward(monitor_of(group_of(ctx.group)), ctx.label)
        if ctx.each is not None:
            ctx.each.closed = True
        return grad, None, None, None


def closing(x: Tensor, each: ForwardPass | None, label: str, group: str) -> Tensor:
    """`x`, the output of the layer `label`; its one backward pass closes the training pass `each`.

    group: c10d name of the group whose ranks are told where that pass fails.
    """
    return _Closing.apply(x, each, label, group)
