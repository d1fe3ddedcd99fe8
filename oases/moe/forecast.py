"""Forecast of the next step's loads, and the decision to change a placement.

Loads of a layer change little between steps (arXiv 2411.10003, locality), so those of earlier steps predict the next
ones; they are known before the step begins, and so is the placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.placement import Integers, Placement, checked_counts, make_placement, plan

KEEPS = (0.0, 0.5, 0.75, 0.9)
"""Weights of the previous average in the moving averages; 0 is the last step's loads."""
_FADE = 0.8
"""Weight of the earlier errors of an average."""


class Forecast:
    """Moving average of counts [expert, device]: of several, the one that has predicted the latest steps best.

    Early in a training loads move by a third in a few steps, and the last step's predict best; loads that only
    fluctuate are predicted by long averages.
    """

    def __init__(self) -> None:
        self._means: list[NDArray[np.float64]] = []
        self._errors = np.zeros(len(KEEPS))

    def observe(self, counts: ArrayLike) -> None:
        """Add a step's counts. UsageError for other sizes than before."""
        found = checked_counts(counts)
        if not self._means:
            self._means = [found.astype(np.float64) for _ in KEEPS]
            return
        if found.shape != self._means[0].shape:
            raise UsageError(f"forecast: counts of {found.shape} after counts of {self._means[0].shape}")
        self._errors *= _FADE
        for at, (keep, mean) in enumerate(zip(KEEPS, self._means, strict=True)):
            moved = found - mean
            self._errors[at] += np.abs(moved).sum()
            mean += (1 - keep) * moved

    def counts(self) -> Integers:
        """Predicted counts of the next step, rounded. RuntimeError before the first observation."""
        if not self._means:
            raise RuntimeError("forecast: no counts were observed yet")
        return np.rint(self._means[int(np.argmin(self._errors))]).astype(np.int64)


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
