"""What the next step's loads will be, and when a placement is changed for them.

The loads of a layer change little from one step to the next (arXiv 2411.10003, figure on locality), so a moving
average tells the next ones; it is known before the step begins, and so is the placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.placement import Integers, Placement, checked_counts, make_placement, plan


@dataclass
class Forecast:
    """A moving average of counts [expert, device].

    keep: share of the average that stays at each step; 0 takes the last step's loads for the next one's.
    """

    keep: float = 0.9
    mean: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise UsageError(f"forecast: keep must be at least 0 and below 1, got {self.keep}")

    def observe(self, counts: ArrayLike) -> None:
        """A step's counts. UsageError for other sizes than before."""
        found = checked_counts(counts)
        if self.mean is None:
            self.mean = found.astype(np.float64)
            return
        if found.shape != self.mean.shape:
            raise UsageError(f"forecast: counts of {found.shape} after counts of {self.mean.shape}")
        self.mean += (1 - self.keep) * (found - self.mean)

    def counts(self) -> Integers:
        """The next step's, rounded. RuntimeError before the first were observed."""
        if self.mean is None:
            raise RuntimeError("forecast: no counts were observed yet")
        return np.rint(self.mean).astype(np.int64)


@dataclass
class Planner:
    """One layer's placements over the steps.

    costs: of the layer. method, memory_budget: as of `plan`. hysteresis: a new placement is taken where it saves at
    least this share of the predicted seconds of the present one under the same loads; else what is in place stays.
    """

    costs: Costs
    method: str = "prophet"
    memory_budget: float | None = None
    hysteresis: float = 0.02
    forecast: Forecast = field(default_factory=Forecast)
    current: Placement | None = None
    changes: int = 0
    """Times that the placement was changed."""

    def next(self, counts: ArrayLike) -> Placement:
        """The placement for the step after one that had these counts."""
        self.forecast.observe(counts)
        expected = self.forecast.counts()
        found = plan(expected, self.costs, method=self.method, memory_budget=self.memory_budget)
        now = self.current or plan(expected, self.costs, method="none")
        stays = make_placement(now.method, expected, self.costs, (now.routes, now.copies))
        if found.predicted_seconds > (1 - self.hysteresis) * stays.predicted_seconds:
            found = stays
        else:
            self.changes += 1
        self.current = found
        return found
