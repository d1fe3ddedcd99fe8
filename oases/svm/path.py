"""Solutions for falling lambda, each begun at the one before; their information criterion and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog
from sklearn.base import BaseEstimator

from oases.svm.certificate import residuals as residuals_of
from oases.svm.design import Design
from oases.svm.estimator import MAX_ITER
from oases.svm.penalties import Floats, Penalty
from oases.svm.polish import Polish, multipliers_at_zero
from oases.svm.problems import Problems
from oases.svm.vertex import Budget

_COLUMNS = 10
_NEAR = 1e-9


@dataclass
class Path:
    """Of L lambdas, falling, and one binary problem (two classes) or one for each class.

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

    @property
    def nonzeros(self) -> Any:
        """Coefficients that are not zero: [problems, L]."""
        return np.count_nonzero(self.coefs, axis=1)

    def decision_function(self, x: Any) -> Floats:
        """[n, problems, L]."""
        return np.stack([np.asarray(x @ coef) for coef in self.coefs], axis=1) + self.intercepts

    def predict(self, x: Any) -> Any:
        """The classes by each lambda: [n, L]."""
        scores = self.decision_function(x)
        return self.classes[(scores[:, 0] > 0).astype(int) if len(self.classes) == 2 else scores.argmax(axis=1)]


def svc_path(
    X: Any, y: Any, *, penalty: str = "scad", theta: float | None = None, lams: Sequence[float] | None = None,
    n_lambdas: int = 50, eps: float = 1e-2, fit_intercept: bool = True, sample_weight: Any = None,
    class_weight: Any = None, max_iter: int = MAX_ITER,
) -> Path:  # fmt: skip
    """Stationary points for falling lambda.

    Of a nonconvex penalty each is the lower of two, from the one before and from the l1 solution.
    lams: in any order; None for n_lambdas of them, evenly spread in logarithm, from the least lambda with w = 0 down
    to eps of it. max_iter: steps for each lambda. The parameters are otherwise those of NonconvexSVC.
    """
    problems = Problems(BaseEstimator(), X, y, sample_weight, class_weight, fit_intercept)
    return path_of(problems, Penalty(penalty, 0.0, theta), lams, n_lambdas, eps, max_iter)


def path_of(problems: Problems, penalty: Penalty, lams: Any, n_lambdas: int, eps: float, max_iter: int) -> Path:
    """The path of problems that are validated; the lambda of `penalty` does not matter."""
    designs = list(problems.designs())
    falling: Floats
    if lams is None:
        if isinstance(n_lambdas, bool) or not isinstance(n_lambdas, (int, np.integer)) or n_lambdas < 1:
            raise ValueError(f"n_lambdas={n_lambdas!r} must be an integer of at least 1")
        if not 0 < eps < 1:
            raise ValueError(f"eps={eps} must be between 0 and 1, the last lambda over the first")
        largest = max(largest_lambda(design, penalty) for design in designs)
        falling = np.asarray(largest * np.geomspace(1.0, eps, n_lambdas) if largest > 0 else np.zeros(1))
    else:
        falling = np.sort(np.asarray(lams, dtype=float).ravel())[::-1].copy()
        if len(falling) == 0:
            raise ValueError("lams is empty; give at least one lambda, or None")
    of_lambda = [replace(penalty, lam=float(lam)) for lam in falling]  # every one is checked before any is solved
    shape = (len(designs), len(falling))
    coefs = np.zeros((len(designs), problems.features, len(falling)))
    intercepts, objectives, residuals, bic = (np.zeros(shape) for _ in range(4))
    for i, design in enumerate(designs):
        budget = Budget(max_iter)
        polish = Polish(design, budget)
        w: Floats = np.zeros(problems.features)
        convex = _Convex(design, budget) if penalty.name != "l1" else None
        for k, at in enumerate(of_lambda):
            budget.used = 0
            point = polish.descend(at, w, priced=False)
            if convex is not None:
                other = polish.descend(at, convex.next(at), priced=False)
                point = other if other.objective < point.objective else point
            w = point.w
            coefs[i, :, k], intercepts[i, k], objectives[i, k] = w, point.b, point.objective
            residuals[i, k] = max(residuals_of(design, w, point.b, point.multipliers, at))
            slack = (point.objective - at.value(w)) * problems.mass
            bic[i, k] = slack + np.log(len(problems.counted)) * np.count_nonzero(w)
    return Path(problems.classes, falling, coefs, intercepts, objectives, residuals, bic)


class _Convex:
    """The path of the l1 problem, at which reweighted linear programmes begin."""

    def __init__(self, design: Design, budget: Budget) -> None:
        self._polish = Polish(design, budget)
        self._w: Floats = np.zeros(design.features)

    def next(self, penalty: Penalty) -> Floats:
        """Its coefficients for the slope at zero of this penalty."""
        at = replace(penalty, name="l1", lam=penalty.slope_at_zero)
        self._w = self._polish.descend(at, self._w, priced=False).w
        return self._w


def largest_lambda(design: Design, penalty: Penalty) -> float:
    """The least lambda with which w = 0 is stationary: on from it the answer is all-zero.

    The multipliers that go with w = 0 are not unique: the heavier class, on the margin, has any in [0, c_i] with the
    right sum. Those of least max_j |sum_i alpha_i y_i x_ij| are found by a linear programme over the columns that
    matter.
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
        # Shares of c_i in [0, 1], and the bound that is minimised.
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
    """Draw the coefficients of one problem over lambda, which falls to the right; returns matplotlib's axes."""
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
