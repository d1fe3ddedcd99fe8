"""Descent to a certified stationary point by linear programs over the working columns, from vertex to vertex.

p is concave in |w|, so its linearisation at w majorises it: the minimum of hinge loss plus linearised penalty is no
worse than w (local linear approximation, Zou & Li 2008). If it is w itself, w is stationary, and the multipliers of
the last program prove it. Columns whose coefficient would stay at zero are left out of the programs and priced
afterwards (column generation, as Dedieu, Mazumder & Wang 2022 do for l1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oases_svm.design import Design
from oases_svm.penalties import Floats, Penalty
from oases_svm.vertex import Budget, Vertex

ALL_COLUMNS = 200
"""Number of columns up to which all are working columns from the start."""
_ADDED = 20
_PIVOTS = 100
"""Steps between two pricings of the columns left out."""
_ZERO = 1e-10
"""Coefficient below which a column of mean square 1 counts as zero: rounding."""
_VIOLATED = 1e-9
_BESIDES = 3e5
"""Cost of a program besides its pivots, in multiplications."""
_TIE, _TIE_MOST = 1e-6, 1e-8
_SAME = 1e-14
"""Difference below which objectives, which are at most about 1, count as equal."""


@dataclass
class Point:
    """Coefficients [d] and intercept in the user's units, multipliers [n], objective.

    settled: whether it is stationary, rather than the end of a budget.
    """

    w: Floats
    b: float
    multipliers: Floats
    objective: float
    settled: bool = True


class Polish:
    """Vertex of one problem, and its working columns."""

    def __init__(self, design: Design, budget: Budget) -> None:
        self.design, self.budget = design, budget
        force = np.abs(design.correlate(multipliers_at_zero(design)))
        usable = np.flatnonzero(design.usable)
        first = usable if len(usable) <= ALL_COLUMNS else np.sort(usable[np.argsort(-force[usable])[:_ADDED]])
        self.columns = first
        self.worked_on = np.zeros(design.features, dtype=bool)
        self.worked_on[first] = True
        self._free = int(design.intercept)
        h = design.columns(first)
        if design.intercept:
            h = np.asfortranarray(np.column_stack([design.labels, h]))
        self.vertex = Vertex(h, design.weights, design.intercept, design.keys)

    @property
    def _all_columns(self) -> bool:
        return len(self.columns) >= int(self.design.usable.sum())

    @property
    def block(self) -> Floats:
        """Scaled working columns, without the intercept's: [n, m]."""
        return self.vertex.h[:, self._free :]

    def descend(self, penalty: Penalty, start: Floats | None = None, *, priced: bool = True) -> Point:
        """Descend from w = start [d], or zeros, to a stationary point.

        priced: solve every program over all columns instead of the last ones alone.
        """
        reference = np.zeros(self.design.features) if start is None else start
        best: Point | None = None
        while True:
            used = self.budget.used
            if not self._minimise(penalty, reference, priced):
                break
            point = self._point(penalty)
            # Without a pivot the point is only proven stationary if the program was that of its own slopes.
            settled = self.budget.used == used and (best is not None or np.array_equal(point.w, reference))
            # At equal objectives up to rounding, the later point is the one the multipliers prove.
            stuck = best is not None and point.objective >= best.objective - _SAME
            if best is None or point.objective <= best.objective + _SAME or settled:
                best = point
            if settled or stuck or penalty.name == "l1":
                if priced or not self._price(penalty):
                    return best
                priced = True
            reference = point.w
        point = self._point(penalty)
        return replace(point if best is None or point.objective < best.objective else best, settled=False)

    def move(self, w: Floats) -> None:
        """Add these columns to the working columns."""
        self._add(np.flatnonzero((w != 0) & ~self.worked_on))

    def _minimise(self, penalty: Penalty, reference: Floats, priced: bool) -> bool:
        """Solve the linear program of the penalty linearised at the reference."""
        self.move(reference)
        self.budget.work += _BESIDES
        while True:
            tau = np.zeros(self.vertex.h.shape[1])
            slopes = np.maximum(penalty.slopes(reference[self.columns]), _tie(penalty))
            tau[self._free :] = slopes / self.design.scale[self.columns]
            partial = priced and not self._all_columns
            done = self.vertex.minimise(tau, self.budget, _PIVOTS if partial else sys.maxsize)
            if not done and self.budget.left == 0:
                return False
            if (not priced or not self._price(penalty)) and done:
                return True

    def _price(self, penalty: Penalty) -> int:
        """Add columns whose coefficient would leave zero; returns their number."""
        if self._all_columns:
            return 0
        _, multipliers = self.vertex.solution()
        excess = np.abs(self.design.correlate(multipliers)) - penalty.slope_at_zero / self.design.scale
        excess[self.worked_on | ~self.design.usable] = 0.0
        count = min(max(_ADDED, len(self.columns) // 5), len(excess))
        chosen = np.argpartition(-excess, count - 1)[:count]
        chosen = np.sort(chosen[excess[chosen] > _VIOLATED])
        self._add(chosen)
        return len(chosen)

    def _add(self, columns: Any) -> None:
        if len(columns):
            self.columns = np.concatenate([self.columns, columns])
            self.worked_on[columns] = True
            self.vertex.add(self.design.columns(columns))

    def _point(self, penalty: Penalty) -> Point:
        scaled, multipliers = self.vertex.solution()
        b = float(scaled[0]) if self._free else 0.0
        scaled = scaled[self._free :]
        kept = np.abs(scaled) > _ZERO
        columns = self.columns[kept]
        w = np.zeros(self.design.features)
        w[columns] = scaled[kept] / self.design.scale[columns]
        slack = 1 - self.block[:, kept] @ scaled[kept] - b * self.design.labels
        loss = float(self.design.weights @ np.maximum(slack, 0.0))
        return Point(w, b - float(self.design.center @ w), multipliers, loss + penalty.value(w))


def _tie(penalty: Penalty) -> float:
    """Slope that decides between minima where p is flat: if rows are separated without loss, all multiples are
    minima.

    The smallest is chosen. The slope is far below the tolerance of residuals.
    """
    return min(_TIE * penalty.slope_at_zero, _TIE_MOST) if penalty.lam else _TIE_MOST


def lower(best: Point, found: Point) -> Point:
    """The lower of two points; the first if they are about equal or the second is not stationary."""
    return found if found.settled and found.objective < best.objective * (1 - 1e-12) else best


def multipliers_at_zero(design: Design) -> Floats:
    """Multipliers of w = 0 with its best intercept: full for the lighter class, partial for the heavier."""
    c, y = design.weights, design.labels
    if not design.intercept:
        return c.copy()
    positive, negative = c[y > 0].sum(), c[y < 0].sum()
    least = min(positive, negative)
    return c * least / np.where(y > 0, positive, negative)


def largest_lambda_bound(design: Design) -> float:
    """A lambda from which w = 0 is proven stationary for a penalty whose slope at zero is lambda."""
    return float(np.abs(design.force(multipliers_at_zero(design))).max(initial=0.0))


def zero_is_stationary(design: Design, penalty: Penalty) -> Point | None:
    """The zero solution if these multipliers prove it, at the cost of one pass over the data; else None."""
    return None if largest_lambda_bound(design) > penalty.slope_at_zero else point_at_zero(design)


def point_at_zero(design: Design) -> Point:
    """w = 0 with its best intercept."""
    c, y = design.weights, design.labels
    positive, negative = c[y > 0].sum(), c[y < 0].sum()
    b = 0.0 if not design.intercept else 1.0 if positive >= negative else -1.0
    loss = 1.0 if not design.intercept else 2 * min(positive, negative)
    return Point(np.zeros(design.features), b, multipliers_at_zero(design), float(loss))


_TRIED = 1000
_ALIKE = 9
_LIKE = 0.2
"""Minimum correlation of columns of which one is tried in place of the other."""
_BETTER = 1e-9


def improved(polish: Polish, penalty: Penalty, best: Point) -> Point:
    """Descend with one coefficient set to zero, or moved to a similar column, as long as that helps.

    Smallest coefficients first, while the budget of `polish` allows.
    """
    tries, helped = 0, True
    while helped:
        helped = False
        for j in np.argsort(np.abs(best.w) * polish.design.scale):
            if best.w[j] == 0:  # or has become zero
                continue
            for start in _without(polish.design, best.w, int(j)):
                if tries == _TRIED or not polish.budget.left:
                    return best
                tries += 1
                found = polish.descend(penalty, start, priced=False)
                if found.settled and found.objective < best.objective * (1 - _BETTER):
                    best, helped = found, True
                    break
    return best


def _without(design: Design, w: Floats, j: int) -> Iterator[Floats]:
    """w without its coefficient j, then with it moved to each of the columns most similar to column j."""
    start = w.copy()
    start[j] = 0.0
    yield start
    column = design.columns(np.array([j]))[:, 0]
    likeness = design.correlate(design.weights * column)
    likeness[w != 0] = 0.0
    for k in np.argsort(-np.abs(likeness))[:_ALIKE]:
        if abs(likeness[k]) < _LIKE:
            return
        moved = start.copy()
        moved[k] = np.sign(likeness[k]) * w[j] * design.scale[j] / design.scale[k]
        yield moved
