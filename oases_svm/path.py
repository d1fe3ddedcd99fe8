"""Regularisation paths: solutions for decreasing lambda with warm starts, their information criterion and plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog
from sklearn.base import BaseEstimator

from oases_svm.design import Design
from oases_svm.estimator import MAX_ITER
from oases_svm.penalties import Floats, Penalty
from oases_svm.polish import Point, Polish, improved, lower, multipliers_at_zero, point_at_zero
from oases_svm.problems import Problems
from oases_svm.solver import Solution, certified
from oases_svm.vertex import Budget

_COLUMNS = 10
_SMALL_CONVEX, _SMALL_SEARCHED, _SEARCHED = 1e9, 5e8, 0.3
"""Minimum budgets, in multiplications, of an l1 solution and of all searches; the latter also in units of earlier
work.
"""
_NEAR = 1e-9
_FAR, _MISSED = 1.1, 3


@dataclass
class Path:
    """Solutions for L decreasing lambdas and one binary problem (two classes) or one per class.

    lams [L]; coefs [problems, d, L]; intercepts, objectives, residuals (the larger of both) and bic [problems, L].
    bic is the sum of the slacks + log(n) non-zeros (Claeskens, Croux & Van Kerckhoven 2008, SVMIC_a).
    """

    classes: Any
    lams: Floats
    coefs: Floats
    intercepts: Floats
    objectives: Floats
    residuals: Floats
    bic: Floats
    solutions: list[list[Solution]] = field(repr=False)  # by problem and lambda, with their multipliers

    @property
    def zeros(self) -> list[int]:
        """Number of leading lambdas with all coefficients zero, by problem."""
        return [int(np.argmax(np.append(some, True))) for some in self.nonzeros > 0]

    @property
    def nonzeros(self) -> Any:
        """Number of non-zero coefficients: [problems, L]."""
        return np.count_nonzero(self.coefs, axis=1)

    def decision_function(self, x: Any) -> Floats:
        """[n, problems, L]."""
        return np.stack([np.asarray(x @ coef) for coef in self.coefs], axis=1) + self.intercepts

    def predict(self, x: Any) -> Any:
        """Predicted classes for each lambda: [n, L]."""
        scores = self.decision_function(x)
        return self.classes[(scores[:, 0] > 0).astype(int) if len(self.classes) == 2 else scores.argmax(axis=1)]


def svc_path(
    X: Any, y: Any, *, penalty: str = "scad", theta: float | None = None, lams: Sequence[float] | None = None,
    n_lambdas: int = 50, eps: float = 1e-2, fit_intercept: bool = True, sample_weight: Any = None,
    class_weight: Any = None, search: bool = True, max_iter: int = MAX_ITER,
) -> Path:  # fmt: skip
    """Compute stationary points for decreasing lambda.

    For a nonconvex penalty each is the lowest of several, reached from solutions of other lambdas; without search
    the one that reweighting reaches from the l1 solution. lams: in any order; None for n_lambdas of them,
    logarithmically spaced, from the smallest lambda with w = 0 down to eps times it. max_iter: maximum steps per
    lambda. Other parameters as in NonconvexSVC.
    """
    problems = Problems(BaseEstimator(), X, y, sample_weight, class_weight, fit_intercept)
    of_name = Penalty(penalty, 0.0, theta)
    return path_of(problems, of_name, grid(problems, of_name, lams, n_lambdas, eps), max_iter, search)


def grid(problems: Problems, penalty: Penalty, lams: Any, n_lambdas: int, eps: float) -> Floats:
    """Lambdas of a path, decreasing; see svc_path."""
    if lams is not None:
        falling = np.sort(np.asarray(lams, dtype=float).ravel())[::-1].copy()
        if len(falling) == 0:
            raise ValueError("lams is empty; give at least one lambda, or None")
        return falling
    if isinstance(n_lambdas, bool) or not isinstance(n_lambdas, (int, np.integer)) or n_lambdas < 1:
        raise ValueError(f"n_lambdas={n_lambdas!r} must be an integer of at least 1")
    if not 0 < eps < 1:
        raise ValueError(f"eps={eps} must be between 0 and 1, the last lambda over the first")
    largest = max(largest_lambda(design, penalty) for design in problems.designs())
    return np.asarray(largest * np.geomspace(1.0, eps, n_lambdas) if largest > 0 else np.zeros(1))


def path_of(
    problems: Problems, penalty: Penalty, falling: Floats, max_iter: int, search: bool, zeros: Sequence[int] = ()
) -> Path:
    """Path of validated problems; the lambda of `penalty` is ignored.

    zeros: number of leading lambdas whose coefficients are all set to zero, by problem.
    """
    of_lambda = [replace(penalty, lam=float(lam)) for lam in falling]  # checks all before solving any
    zeros = zeros if len(zeros) == len(problems) else [0] * len(problems)
    found = [
        list(_solutions(design, of_lambda, max_iter, search, zero))
        for design, zero in zip(problems.designs(), zeros, strict=True)
    ]
    coefs = np.stack([np.stack([at.w for at in path], axis=1) for path in found])
    intercepts = np.array([[at.b for at in path] for path in found])
    objectives = np.array([[at.objective for at in path] for path in found])
    residuals = np.array([[max(at.primal, at.dual) for at in path] for path in found])
    penalties = np.array([[at.value(s.w) for at, s in zip(of_lambda, path, strict=True)] for path in found])
    slacks = (objectives - penalties) * problems.mass
    bic = slacks + np.log(len(problems.counted)) * np.count_nonzero(coefs, axis=1)
    return Path(problems.classes, falling, coefs, intercepts, objectives, residuals, bic, found)


def _solutions(design: Design, falling: list[Penalty], max_iter: int, search: bool, zeros: int) -> Iterator[Solution]:
    budget = Budget(max_iter)
    local = falling[0].name != "l1" and not search
    points, steps = (_reweighted if local else _points)(design, falling, budget)
    for k, (at, point, taken) in enumerate(zip(falling, points, steps, strict=True)):
        yield certified(design, at, point_at_zero(design) if k < zeros else point, taken)


def _reweighted(design: Design, falling: list[Penalty], budget: Budget) -> tuple[list[Point], list[int]]:
    """Solve for each lambda from the l1 solution."""
    polish, convex = Polish(design, budget), _Convex(design, budget)
    points, steps = [], []
    for at in falling:
        budget.used = 0
        points.append(polish.descend(at, convex.next(at), priced=False))
        steps.append(budget.used)
    return points, steps


def _points(design: Design, falling: list[Penalty], budget: Budget) -> tuple[list[Point], list[int]]:
    """Solve downwards with warm starts and, for a nonconvex penalty, also from l1 solutions; then upwards and down
    again.

    On the way up the solution of the next lambda may be a better start, and on the way down again one that was
    found by changing single coefficients.
    """
    polish = Polish(design, budget)
    convex = _Convex(design, budget) if falling[0].name != "l1" else None
    missed = 0  # consecutive starts at l1 solutions that were far above
    others = 0.0  # work of starts at l1 solutions, limited to that of the rest
    points: list[Point] = []
    steps: list[int] = []
    w: Floats = np.zeros(design.features)
    for at in falling:
        budget.used = 0
        points.append(polish.descend(at, w, priced=False))
        if convex is not None and missed < _MISSED:
            before = budget.work
            with budget.within(max(before - 2 * others, 0.0) + _SMALL_CONVEX):
                start = convex.next(at)
                if start is not None:
                    found = polish.descend(at, start, priced=False)
                    missed = missed + 1 if found.objective > _FAR * points[-1].objective else 0
                    points[-1] = lower(points[-1], found)
            others += budget.work - before
        w = points[-1].w
        steps.append(budget.used)
    if convex is not None:
        order = range(len(points))
        search = max(budget.work * _SEARCHED, _SMALL_SEARCHED) / len(points)
        for turn, work in ((order[::-1], 0.0), (order, search), (order[::-1], 0.0)):
            _pass_on(polish, falling, points, steps, turn, work)
    return points, steps


def _pass_on(
    polish: Polish, falling: list[Penalty], points: list[Point], steps: list[int], order: Sequence[int], search: float
) -> None:
    """Warm-start each lambda from the previous one in this order and keep it if lower; search if its support is
    new.

    Zero is kept where it is stationary: a path begins with it.
    """
    last: Floats | None = None
    for k in order:
        if not np.any(points[k].w):
            continue
        polish.budget.used = steps[k]
        if last is not None:
            points[k] = lower(points[k], polish.descend(falling[k], falling[k].flattened(last), priced=False))
        if search and (last is None or not np.array_equal(points[k].w != 0, last != 0)):
            with polish.budget.within(search):
                points[k] = improved(polish, falling[k], points[k])
        steps[k], last = polish.budget.used, points[k].w


class _Convex:
    """Path of the l1 problem, from which reweighted linear programs start."""

    def __init__(self, design: Design, budget: Budget) -> None:
        self._polish = Polish(design, budget)
        self._w: Floats = np.zeros(design.features)
        self._ended = False

    def next(self, penalty: Penalty) -> Floats | None:
        """Coefficients for the penalty's slope at zero; None once the budget is spent."""
        at = replace(penalty, name="l1", lam=penalty.slope_at_zero)
        if not self._ended:
            point = self._polish.descend(at, self._w, priced=False)
            self._ended, self._w = not point.settled, point.w
        return None if self._ended else self._w


def largest_lambda(design: Design, penalty: Penalty) -> float:
    """Smallest lambda for which w = 0 is stationary: from it on the solution is zero.

    The multipliers for w = 0 are not unique: rows of the heavier class, on the margin, have any in [0, c_i] with
    the right sum. Those with the least max_j |sum_i alpha_i y_i x_ij| are found by a linear program over the
    columns that matter.
    """
    for_slope = replace(penalty, lam=1.0).slope_at_zero
    alpha = multipliers_at_zero(design)
    force = design.force(alpha)
    if not design.intercept or not np.any(force):
        return float(np.abs(force).max(initial=0.0)) / for_slope
    c, y = design.weights, design.labels
    heavier = 1.0 if c[y > 0].sum() >= c[y < 0].sum() else -1.0
    loose = y == heavier
    fixed = design.force(np.where(loose, 0.0, c))
    columns: list[int] = []
    bound = 0.0
    while True:
        largest = np.abs(force).max()
        fresh = [int(j) for j in np.argsort(-np.abs(force))[:_COLUMNS] if j not in columns and abs(force[j]) > bound]
        if largest <= bound * (1 + _NEAR) or not fresh:
            return float(largest) / for_slope
        columns += fresh
        unit = np.abs(fixed[columns]).max() or largest
        h = design.raw_columns(columns)[loose].T / unit
        least = np.concatenate([h, -h]), np.concatenate([-fixed[columns], fixed[columns]]) / unit
        # Fractions of c_i in [0, 1], and the bound to minimise.
        matrix = np.column_stack([least[0] * c[loose], -np.ones(2 * len(columns))])
        found = linprog(
            np.append(np.zeros(loose.sum()), 1.0), A_ub=matrix, b_ub=least[1],
            A_eq=np.append(c[loose], 0.0)[None] / c[~loose].sum(), b_eq=[1.0],
            bounds=[(0, 1)] * int(loose.sum()) + [(0, None)], method="highs",
        )  # fmt: skip
        if found.status != 0:
            raise RuntimeError(f"the largest lambda was not found: {found.message}; give lams")
        alpha = c.copy()
        alpha[loose] *= np.clip(found.x[:-1], 0.0, 1.0)
        bound, force = float(found.x[-1]) * unit, design.force(alpha)


def plot_path(path: Path, ax: Any = None, problem: int = 0) -> Any:
    """Plot the coefficients of one problem over lambda, decreasing to the right; returns matplotlib's axes."""
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.figure().add_subplot()
    moving = path.coefs[problem][np.any(path.coefs[problem] != 0, axis=1)]
    ax.plot(path.lams, moving.T, linewidth=1)
    if len(path.lams) > 1 and path.lams[-1] > 0:
        ax.set_xscale("log")
    ax.invert_xaxis()
    ax.axvline(path.lams[path.bic[problem].argmin()], color="grey", linestyle=":", label="least BIC")
    ax.set_xlabel("lambda")
    ax.set_ylabel("coefficient")
    ax.legend(frameon=False)
    return ax
