"""Check of every step for non-finite losses or gradients."""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch

from oases.core.execution.group import ProcessGroup, group_rank
from oases.distributed.collectives import all_reduce
from oases.errors import UsageError

Policy = Literal["stop", "skip", "off"]
POLICIES: tuple[Policy, ...] = ("stop", "skip", "off")


class LossError(UsageError):
    """Bad loss or gradient under the policy `stop`. The weights are those from before the step."""


class StepCheck:
    """Check, with the same outcome on all ranks, whether a step may update the weights.

    policy: stop raises LossError, skip drops the step's gradients, off disables the check.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy: Policy = policy
        self.skipped: list[int] = []
        """Steps skipped in this process."""

    def accepts(
        self, loss: float, norm: float, step: int, process_group: ProcessGroup | None, device: torch.device
    ) -> bool:
        """Whether the step may update the weights. Collective over all ranks, unless off.

        loss: nats per token, and norm: global gradient norm, on this rank.
        """
        if self.policy == "off":
            return True
        bad = torch.tensor([float(bool(self._fault(loss, norm)))], device=device)
        if not all_reduce(bad, process_group, "bad loss", largest=True).item():
            return True
        what = self._fault(loss, norm) or f"the loss {loss:.4g} or the gradient is bad on another rank"
        if self.policy == "stop":
            raise LossError(
                f"step {step}: {what}; lower --learning-rate or --clip, or give --bad-loss skip to skip such steps"
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
        return ""
