"""Solver of one binary problem: several starts of the descent, of which the lowest stationary point is returned.

A nonconvex penalty has many stationary points. Solutions of larger lambda lead down to one, those of smaller lambda
back up to another, ADMM to a third. The descent from zero is that of reweighted linear programs: unless it takes
much longer than the rest, the result is not above theirs.
With multipliers alpha_i in c_i times the subdifferential of the hinge, a stationary point has
    sum_i alpha_i y_i x_ij  in the subdifferential of p at w_j, for every j,    and    sum_i alpha_i y_i = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from oases_svm.admm import Admm, least_scale
from oases_svm.design import Design
from oases_svm.factor import DenseMatrix, Matrix, SparseMatrix
from oases_svm.penalties import Floats, Penalty
from oases_svm.polish import Point, Polish, improved, largest_lambda_bound, lower, zero_is_stationary
from oases_svm.vertex import Budget

_INSIDE = 1e-9
"""Fraction of c_i within which a multiplier counts as 0 or c_i."""


def residuals(
    design: Design, margin: Floats, w: Floats, multipliers: Floats, penalty: Penalty
) -> tuple[float, float]:
    """(primal, dual): the largest violations of optimality by coefficients w with these margins [n].

    Primal, in units of the margin: a row with a multiplier below c_i must not be inside the margin, one with a
    multiplier above 0 not outside. Dual, in units of the penalty's slope: the largest distance to the
    subdifferential at any coordinate, and |sum alpha y| with an intercept.
    """
    weights = design.weights
    short = np.where(multipliers < (1 - _INSIDE) * weights, 1 - margin, 0.0)
    beyond = np.where(multipliers > _INSIDE * weights, margin - 1, 0.0)
    primal = max(float(short.max(initial=0.0)), float(beyond.max(initial=0.0)))
    low, high = penalty.subdifferential(w)
    force = design.force(multipliers)
    dual = float(np.maximum(low - force, force - high).max(initial=0.0))
    if design.intercept:
        dual = max(dual, abs(float(multipliers @ design.labels)))
    return primal, dual


def objective(design: Design, margin: Floats, w: Floats, penalty: Penalty) -> float:
    """sum_i c_i [1 - y_i (x_i'w + b)]_+ + sum_j p(w_j)."""
    return float(design.weights @ np.maximum(0.0, 1 - margin)) + penalty.value(w)


_EXPLORED = 200
"""ADMM steps of a start for another stationary point; the descent makes it exact."""
_ROUGH = 1e-3
_FALL, _FALL_BELOW, _FALLS = 0.8, 0.7, 40
"""Factors of lambda from step to step on the way down, and below the given one; maximum steps."""
_BELOW, _REWEIGHTED, _SEARCHED = 15.0, 0.3, 0.3
"""Budgets of smaller lambdas, of reweighting from zero, and of the search, as factors of the earlier work."""
_SMALL_BELOW, _LARGE_BELOW, _SMALL_REWEIGHTED, _SMALL_SEARCHED = 3e8, 1.6e10, 1e9, 1e8
"""Bounds of these, in multiplications, about 3e9 of which take a second."""


@dataclass
class Solution:
    """Result of a fit. Residuals are those of `residuals`, or of ADMM without polish."""

    w: Floats
    b: float
    multipliers: Floats
    objective: float
    primal: float
    dual: float
    iterations: int


Explore = Callable[[Polish, Penalty], Floats]
"""Scaled coefficients that ADMM reaches from zero over the working columns."""


def solve(
    design: Design, penalty: Penalty, limit: int, start: Floats | None, explore: Explore | None, search: bool
) -> Solution:
    """Find the lowest stationary point, or without search the one that reweighting reaches from zero.

    start: additional starting coefficients [d].
    """
    budget = Budget(limit)
    # If the slope at zero is far above lambda, zero is stationary long before it is good: use the flatter l1.
    flatter = replace(penalty, name="l1") if penalty.slope_at_zero > penalty.lam else penalty
    zero = zero_is_stationary(design, flatter)
    if zero is not None:
        budget.spend(0.0)
        return certified(design, penalty, zero, budget.used)
    polish = Polish(design, budget)
    if penalty.name == "l1" or not search:
        best = polish.descend(penalty)
        for begin in _given(polish, penalty, start) if penalty.name != "l1" else ():
            best = lower(best, polish.descend(penalty, begin, priced=False))
        return certified(design, penalty, best, budget.used)
    best = _followed(polish, penalty)
    allowed = _SMALL_BELOW + min(_BELOW * budget.work, _LARGE_BELOW)
    for begin in _given(polish, penalty, start):
        best = lower(best, polish.descend(penalty, begin, priced=False))
    with budget.within(max(_SEARCHED * budget.work, _SMALL_SEARCHED)):
        best = lower(best, _explored(polish, penalty, explore or explore_here))
    with budget.within(allowed):
        found = list(_below(polish, penalty, best.w))
    with budget.within(allowed):
        for begin in reversed(found):
            best = lower(best, polish.descend(penalty, penalty.flattened(begin), priced=False))
    with budget.within(max(_REWEIGHTED * budget.work, _SMALL_REWEIGHTED)):
        best = lower(best, Polish(design, budget).descend(penalty))
    with budget.within(max(_SEARCHED * budget.work, _SMALL_SEARCHED)):
        best = improved(polish, penalty, best)
    return certified(design, penalty, best, budget.used)


def _followed(polish: Polish, penalty: Penalty) -> Point:
    """Follow solutions from the largest lambda down: few working columns, however small lambda is."""
    w: Floats = np.zeros(polish.design.features)
    if penalty.lam == 0:
        return polish.descend(penalty, priced=False)
    largest = largest_lambda_bound(polish.design) * penalty.lam / penalty.slope_at_zero
    steps = max(min(math.ceil(math.log(largest / penalty.lam) / -math.log(_FALL)), _FALLS), 1)
    for lam in np.geomspace(largest, penalty.lam, steps + 1)[1:-1]:
        w = polish.descend(replace(penalty, lam=float(lam)), w, priced=False).w
    return polish.descend(penalty, w, priced=False)


def _below(polish: Polish, penalty: Penalty, w: Floats) -> Iterator[Floats]:
    """Solutions for smaller lambda with warm starts, until they no longer change.

    If the penalty is flat there, the features they use often lead to a lower stationary point with this lambda.
    """
    for step in range(1, _FALLS):
        used, size = polish.budget.used, np.count_nonzero(w)
        point = polish.descend(replace(penalty, lam=penalty.lam * _FALL_BELOW**step), w, priced=False)
        if not point.settled:
            return
        if polish.budget.used == used and np.count_nonzero(point.w) == size:
            return
        w = point.w
        yield w


def _explored(polish: Polish, penalty: Penalty, explore: Explore) -> Point:
    """Descend from the result of ADMM over the working columns."""
    w: Floats = np.zeros(polish.design.features)
    columns = polish.columns
    w[columns] = explore(polish, penalty) / polish.design.scale[columns]
    return polish.descend(penalty, w, priced=False)


def _given(polish: Polish, penalty: Penalty, start: Floats | None) -> Iterator[Floats]:
    """The user's start, and the l1 solution with this lambda unless the first program finds it."""
    if start is not None and np.any(start):
        yield start
    if penalty.slope_at_zero != penalty.lam:
        yield polish.descend(replace(penalty, name="l1"), priced=False).w


def explore_here(polish: Polish, penalty: Penalty) -> Floats:
    """A short run of ADMM over the working columns."""
    design, columns = polish.design, polish.columns
    scale = np.maximum(design.scale[columns], least_scale(penalty))
    change = scale / design.scale[columns]
    admm = Admm(
        DenseMatrix(polish.block / change), design.labels, design.weights, scale, penalty, design.intercept
    )  # fmt: skip
    return admm.run(_EXPLORED, _ROUGH, polish.budget).z / change


def solve_plainly(design: Design, penalty: Penalty, limit: int, tol: float, start: Floats | None) -> Solution:
    """ADMM alone over all columns, as published; its residuals are relative."""
    budget = Budget(limit)
    scale = np.where(design.usable, np.maximum(design.scale, least_scale(penalty)), 1.0)
    scaled = Design(design.x, design.labels, design.weights, design.intercept, (design.center, scale, design.usable))
    matrix: Matrix = SparseMatrix(scaled) if sparse.issparse(design.x) else DenseMatrix(
        np.where(design.usable, scaled.columns(np.arange(design.features)), 0.0)
    )  # fmt: skip
    admm = Admm(matrix, design.labels, design.weights, scale, penalty, design.intercept)
    if start is not None and np.any(start):
        admm.begin(start * scale, 0.0)
    outcome = admm.run(limit, tol, budget)
    w = outcome.z / scale
    b = outcome.b - float(design.center @ w)
    multipliers = np.clip(-admm.factor * 3.0 * design.weights * admm.v, 0.0, design.weights)
    return Solution(
        w, b, multipliers, objective(design, design.margins(w, b), w, penalty), outcome.primal, outcome.dual,
        max(budget.used, 1),
    )  # fmt: skip


def certified(design: Design, penalty: Penalty, point: Point, iterations: int) -> Solution:
    """Solution of a point with its residuals, after so many iterations."""
    margin = design.margins(point.w, point.b)
    primal, dual = residuals(design, margin, point.w, point.multipliers, penalty)
    value = objective(design, margin, point.w, penalty)
    return Solution(point.w, point.b, point.multipliers, value, primal, dual, max(iterations, 1))
