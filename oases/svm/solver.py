"""One binary problem: starts for the descent, of which the lowest stationary point is taken.

A nonconvex penalty has many stationary points. The descent from zero is that of reweighted linear programmes, so the
answer is never above theirs; ADMM, from zero and from that point, reaches others, often lower ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from oases.svm.admm import Admm, least_scale
from oases.svm.certificate import objective, residuals
from oases.svm.design import Design
from oases.svm.factor import DenseMatrix, Matrix, SparseMatrix
from oases.svm.penalties import Floats, Penalty
from oases.svm.polish import Point, Polish, multipliers_at_zero, zero_is_stationary
from oases.svm.vertex import Budget

_EXPLORED = 200
"""Steps of ADMM that look for another stationary point; the descent makes it exact."""
_ROUGH = 1e-3
_SHARP = (1.0, 0.1)
"""Of surrogate penalties: theta over the size of coefficients."""
_TRIED = 1000
"""Changes of one coefficient that are tried."""
_WORK, _STEP = 3 * 10**8, 10**5
"""Products of numbers that these may take on small data; what a step costs besides those of rows and columns."""
_ALIKE = 9
_LIKE = 0.2
"""The least correlation of columns one of which is tried for the other."""


@dataclass
class Solution:
    """What a fit found. Residuals are those of `certificate.residuals`, of ADMM where nothing was polished."""

    w: Floats
    b: float
    multipliers: Floats
    objective: float
    primal: float
    dual: float
    iterations: int


Explore = Callable[[Polish, Penalty, Floats, float], tuple[Floats, float]]
"""From columns worked on, a penalty and a start (scaled, of these columns): coefficients that ADMM comes to."""


def solve(design: Design, penalty: Penalty, limit: int, start: Floats | None, explore: Explore | None) -> Solution:
    """The lowest stationary point that is found, polished. `start` [d]: coefficients to begin at besides."""
    budget = Budget(limit)
    # Where the slope at zero is far above lambda, zero is stationary long before it is any good: ask the flatter l1.
    flatter = replace(penalty, name="l1") if penalty.slope_at_zero > penalty.lam else penalty
    zero = zero_is_stationary(design, flatter)
    if zero is not None:
        budget.spend()
        return _certified(design, penalty, zero, budget)
    polish = Polish(design, budget)
    best = polish.descend(penalty)
    if penalty.name != "l1":
        for candidate in _candidates(polish, penalty, best, start, explore or explore_here):
            found = polish.descend(penalty, candidate, priced=False)
            if found.objective < best.objective * (1 - 1e-12):
                best = found
        best = _improved(polish, penalty, best)
    return _certified(design, penalty, best, budget)


def _candidates(
    polish: Polish, penalty: Penalty, best: Point, start: Floats | None, explore: Explore
) -> Iterator[Floats]:
    design = polish.design
    if start is not None and np.any(start):
        yield start
    if penalty.slope_at_zero != penalty.lam:  # where the first programme is not the l1 problem with this lambda
        yield polish.descend(replace(penalty, name="l1"), priced=False).w
    yield from _surrogates(polish, penalty, best.w)
    for begin in (np.zeros(design.features), best.w):
        polish.move(begin)
        columns = polish.columns
        scaled, _ = explore(polish, penalty, begin[columns] * design.scale[columns], 0.0)
        found = np.zeros(design.features)
        found[columns] = scaled / design.scale[columns]
        yield found


def _surrogates(polish: Polish, penalty: Penalty, w: Floats) -> Iterator[Floats]:
    """Stationary points of sharper penalties with the same slope at zero.

    Where a penalty is flat, linear programmes have many solutions, of which these are the sparse ones.
    """
    sizes = np.abs(w[w != 0])
    if len(sizes) == 0 or penalty.lam == 0:
        return
    for sharpness in _SHARP:
        theta = float(np.median(sizes)) * sharpness
        yield polish.descend(Penalty("lsp", penalty.slope_at_zero * theta, theta), w, priced=False).w


def _improved(polish: Polish, penalty: Penalty, best: Point) -> Point:
    """Descend with one coefficient set to zero, or given to a column like its own, as long as that helps.

    The smallest first; at most a quarter of the steps taken so far, or, of small data, what _WORK allows.
    """
    used, size = polish.budget.used, polish.design.rows * len(polish.columns)
    allowed, tries = used + max(used // 4, _WORK // (size + _STEP)), 0
    helped = True
    while helped:
        helped = False
        for j in np.argsort(np.abs(best.w) * polish.design.scale):
            if best.w[j] == 0:  # or no longer another
                continue
            for start in _without(polish.design, best.w, int(j)):
                if tries == _TRIED or polish.budget.used >= allowed or not polish.budget.left:
                    return best
                tries += 1
                found = polish.descend(penalty, start, priced=False)
                if found.objective < best.objective * (1 - 1e-9):
                    best, helped = found, True
                    break
    return best


def _without(design: Design, w: Floats, j: int) -> Iterator[Floats]:
    """w without its coefficient j, then with that moved to each of the columns most like column j."""
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


def explore_here(polish: Polish, penalty: Penalty, begin: Floats, b: float) -> tuple[Floats, float]:
    """A short run of ADMM over the columns worked on."""
    design, columns = polish.design, polish.columns
    scale = np.maximum(design.scale[columns], least_scale(penalty))
    change = scale / design.scale[columns]
    admm = Admm(
        DenseMatrix(polish.block / change), design.labels, design.weights, scale, penalty, design.intercept
    )  # fmt: skip
    if np.any(begin):
        admm.begin(begin * change, b)
    outcome = admm.run(_EXPLORED, _ROUGH, polish.budget)
    return outcome.z / change, outcome.b


def solve_plainly(design: Design, penalty: Penalty, limit: int, tol: float, start: Floats | None) -> Solution:
    """ADMM alone, over all columns, as published; its residuals are relative."""
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
        w, b, multipliers, objective(design, w, b, penalty), outcome.primal, outcome.dual,
        max(budget.used, 1),
    )  # fmt: skip


def largest_lambda_bound(design: Design) -> float:
    """A lambda from which on w = 0 is proven stationary for a penalty whose slope at zero is lambda."""
    return float(np.abs(design.force(multipliers_at_zero(design))).max(initial=0.0))


def _certified(design: Design, penalty: Penalty, point: Point, budget: Budget) -> Solution:
    primal, dual = residuals(design, point.w, point.b, point.multipliers, penalty)
    value = objective(design, point.w, point.b, penalty)
    return Solution(point.w, point.b, point.multipliers, value, primal, dual, max(budget.used, 1))
