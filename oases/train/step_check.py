"""What happens to a step whose loss or gradient is no number, or whose loss leaps."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Literal

import torch

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_rank
from oases.parallel.collectives import all_reduce

Policy = Literal["stop", "skip", "off"]
POLICIES: tuple[Policy, ...] = ("stop", "skip", "off")
RECENT = 32
"""Losses whose median says what is usual."""
ENOUGH = 8
"""Losses before anything counts as a leap."""


class LossError(UsageError):
    """A step's loss or gradient was bad and the policy is to stop. The weights are those from before the step."""


class StepCheck:
    """Decides, the same on all ranks, whether a step may change the weights.

    policy: stop raises LossError, skip drops the step's gradients, off lets everything pass. spike: a loss above so
    many times the median of the last ones counts as bad; 0: only what is not finite does. recent: losses to begin
    with, of a run that goes on.
    """

    def __init__(self, policy: Policy, spike: float, recent: Iterable[float] = ()) -> None:
        self.policy: Policy = policy
        self.spike = spike
        self.recent = deque(recent, maxlen=RECENT)
        self.skipped: list[int] = []
        """Steps whose gradients were dropped, in this process."""

    def accepts(
        self, loss: float, norm: float, step: int, process_group: ProcessGroup | None, device: torch.device
    ) -> bool:
        """Whether the step may change the weights; all ranks call it.

        loss: in nats per byte, norm: of the gradient, as this rank knows them. One small collective, unless off.
        """
        if self.policy == "off":
            return True
        bad = torch.tensor([float(bool(self._fault(loss, norm)))], device=device)
        if not all_reduce(bad, process_group, "bad loss", largest=True).item():
            self.recent.append(loss)
            return True
        what = self._fault(loss, norm) or f"the loss {loss:.4g} or the gradient is bad on another rank"
        if self.policy == "stop":
            raise LossError(
                f"step {step}: {what}; lower --learning-rate or --clip, or give --bad-loss skip to go on without "
                "such steps"
            )
        self.skipped.append(step)
        if group_rank(process_group) == 0:
            warnings.warn(f"step {step} is skipped: {what}", stacklevel=2)
        return False

    def _fault(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the norm of the gradient is {norm}"
        if self.spike and len(self.recent) >= ENOUGH:
            usual = statistics.median(self.recent)
            if loss > self.spike * usual:
                return f"the loss leaps to {loss:.4g}, more than {self.spike:g} times {usual:.4g}"
        return ""
