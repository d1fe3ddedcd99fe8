"""Forecast of the next step's loads, and the decision to change a placement.

Loads of a layer change little between steps (arXiv 2411.10003, locality), so a moving average predicts the next ones;
it is known before the step begins, and so is the placement.
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
    """Moving average of counts [expert, device].

    keep: weight of the previous average; 0 uses the last step's loads.
    """

    keep: float = 0.9
    mean: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise UsageError(f"forecast: keep must be at least 0 and below 1, got {self.keep}")

    def observe(self, counts: ArrayLike) -> None:
        """Add a step's counts. UsageError for other sizes than before."""
        found = checked_counts(counts)
        if self.mean is None:
            self.mean = found.astype(np.float64)
            return
        if found.shape != self.mean.shape:
            raise UsageError(f"forecast: counts of {found.shape} after counts of {self.mean.shape}")
        self.mean += (1 - self.keep) * (found - self.mean)

    def counts(self) -> Integers:
        """Predicted counts of the next step, rounded. RuntimeError before the first observation."""
        if self.mean is None:
            raise RuntimeError("forecast: no counts were observed yet")
        return np.rint(self.mean).astype(np.int64)


@dataclass
class Planner:
    """Placements of one layer over the steps.

    costs: of the layer. method, memory_budget: as in `plan`. hysteresis: a new placement is taken where it saves at
    least this fraction of the predicted seconds of the current one under the same loads.
    """

    costs: Costs
    method: str = "prophet"
    memory_budget: float | None = None
    hysteresis: float = 0.02
    forecast: Forecast = field(default_factory=Forecast)
    current: Placement | None = None
    changes: int = 0
    """Number of changes of the placement."""

    def next(self, counts: ArrayLike) -> Placement:
        """Placement of the next step, after a step with these counts."""
        self.forecast.observe(counts)
        expected = self.forecast.counts()
        found = plan(expected, self.costs, method=self.method, memory_budget=self.memory_budget)
        now = self.current or plan(expected, self.costs, method="none")
        unchanged = make_placement(now.method, expected, self.costs, (now.routes, now.copies))
        if found.predicted_seconds > (1 - self.hysteresis) * unchanged.predicted_seconds:
            found = unchanged
        else:
            self.changes += 1
        self.current = found
        return found
