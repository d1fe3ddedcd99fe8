"""`oases.check`: whether a sharded model trains as the unsharded one, whatever library sharded it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from oases_check.case import Batch, Case, sgd, torch_norm
from oases_check.compare import Finding
from oases_check.ranks import check_case
from oases_check.report import CheckReport

__all__ = ["Case", "CheckReport", "Finding", "check"]


def check(
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module], nn.Module],
    batch: Callable[[int], Batch] | Batch,
    *,
    steps: int = 2,
    tp: int = 2,
    dp: int = 1,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    norm: Callable[[nn.Module], Any] | None = torch_norm,
    training: bool = True,
    timeout_seconds: float = 300.0,
) -> CheckReport:
    """Train a model in one process and on tp x dp CPU ranks, and compare.

    Functions must be importable by name, since ranks are processes of their own; see `Case` for each. Compared are
    losses, outputs of modules, gradients of both, the norm of gradients, and updated weights, up to the rounding of
    their type; what differs is run again in float64. A finding names the parameter, the factor by which it is wrong
    and the collective that suggests.

    Raises UsageError for a model that draws random numbers, functions that return something else, and ranks that fail
    or hang.
    """
    case = Case(build, parallelize, batch, steps, tp, dp, loss, optimizer, norm, training)
    return CheckReport(*check_case(case, timeout_seconds))
