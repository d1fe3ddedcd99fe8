"""What a forward pass was computed with, so that its recomputation is computed with the same.

A router's bias and a placement change from step to step. A recomputation, in the backward pass, must not take new
ones: it would send tokens elsewhere. So both stay while a forward pass is open, that is, until its backward pass has
begun: they change at the first forward pass of a training step, whatever its number of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oases.moe.dispatch import RoutingError
from oases.moe.placement_data import Integers, Placement

MOST_OPEN = 64
"""Forward passes that wait for their backward passes; of more, the oldest are taken to have none."""


def is_recomputation() -> bool:
    """Whether a layer that is called now recomputes: inside of a backward pass, as torch.utils.checkpoint does."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, eq=False)
class RoutingState:
    """What may change between steps. bias: a copy of the router's, None where it has none."""

    placement: Placement
    bias: Tensor | None


@dataclass(eq=False)
class ForwardPass:
    """A forward pass in training. counts: [expert, device], once they are known. done: it came to its end."""

    setting: RoutingState
    counts: Integers | None = None
    done: bool = False
    closed: bool = False


class OpenPasses:
    """The open passes of one layer, and the setting of the next one."""

    def __init__(self) -> None:
        self._open: list[ForwardPass] = []

    def all_closed(self) -> bool:
        """Whether the setting may change. The same on every rank: it follows from the order of calls alone."""
        self._open = [each for each in self._open if each.done and not each.closed]
        if len(self._open) < MOST_OPEN:
            return not self._open
        del self._open[0]
        return True

    def open(self, setting: RoutingState) -> ForwardPass:
        """A forward pass begins."""
        self._open.append(ForwardPass(setting))
        return self._open[-1]

    def settings(self) -> list[RoutingState]:
        """Those of open passes, one of which a recomputation has; nearly always one."""
        found: list[RoutingState] = []
        for each in self._open:
            if each.counts is not None and each.setting not in found:
                found.append(each.setting)
        return found

    def find(self, settings: list[RoutingState], candidates: Integers, label: str) -> tuple[int, ForwardPass]:
        """Which pass is computed again: (place of its setting, pass). candidates: the counts under each setting.

        RoutingError where none had such counts.
        """
        for each in sorted(self._open, key=lambda each: each.closed):  # of two alike each is found once
            if each.counts is not None:
                index = settings.index(each.setting)
                if np.array_equal(each.counts, candidates[index]):
                    return index, each
        raise RoutingError(
            f"{label}: a recomputation sends tokens to other experts than its forward pass did. What comes before "
            "the router must compute the same twice: keep the random state (preserve_rng_state=True), and use "
            "deterministic kernels"
        )


class _Closing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, each: ForwardPass) -> Tensor:
        ctx.each = each
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.each.closed = True
        return grad, None


def closing(x: Tensor, each: ForwardPass) -> Tensor:
    """`x`, the output of a pass: the backward pass that begins with it closes the pass."""
    return _Closing.apply(x, each)
