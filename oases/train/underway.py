"""A run as those see it who stand around its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from oases.execution.group import ProcessGroup
from oases.plans.plan import Plan
from oases.train.balance import Balance
from oases.train.checkpoint.record import Record
from oases.train.config import TrainConfig
from oases.train.guard import LossGuard
from oases.train.measures import Meter
from oases.train.optimizer import Optimizer


class Underway(Protocol):
    """What supervision and reports read of a trainer. What each is, `Trainer` says."""

    config: TrainConfig
    plan: Plan | None
    group: ProcessGroup | None
    device: torch.device
    optimizer: Optimizer
    meter: Meter
    guard: LossGuard
    steps_done: int
    gradient_norm: float
    resumed: Path | None
    balance: Balance | None

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""

    @property
    def evaluations(self) -> Mapping[int, float]:
        """Validation losses by the steps done."""

    @property
    def sizes(self) -> dict[str, Any]:
        """What a model must be built with to load this one's weights."""

    def learning_rate(self, step: int) -> float:
        """Of a step, counted from 0."""

    def settle(self) -> None:
        """Before a checkpoint: what each rank counts by itself goes into what all ranks have. All ranks call it."""

    def record(self) -> Record:
        """Where the run stands."""
