"""Classifier with the scikit-learn estimator API."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, validate_data

from oases_svm.penalties import Penalty
from oases_svm.problems import Problems
from oases_svm.solver import Solution, solve, solve_plainly

MAX_ITER = 1_000_000


class LinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Methods that depend on `coef_`, `intercept_` and `classes_` only."""

    def decision_function(self, X: Any) -> Any:
        """Signed distances to the hyperplanes, in units of the margin: [n] for two classes, else [n, classes]."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=("csr", "csc"), dtype=np.float64, reset=False)
        scores = safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
        return scores.ravel() if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> Any:
        """Predicted class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _keep(self, found: list[Solution], tol: float, multipliers: list[Any]) -> None:
        """Set the attributes of a fit, and warn if it did not converge."""
        self.coef_ = np.stack([solution.w for solution in found])
        self.intercept_ = np.array([solution.b for solution in found])
        self.multipliers_ = np.stack(multipliers)
        objectives = np.array([solution.objective for solution in found])
        self.objective_ = float(objectives[0]) if len(found) == 1 else objectives
        self.primal_residual_ = max(solution.primal for solution in found)
        self.dual_residual_ = max(solution.dual for solution in found)
        self.n_iter_ = max(solution.iterations for solution in found)
        if not max(self.primal_residual_, self.dual_residual_) <= tol:
            warnings.warn(
                f"{type(self).__name__} did not converge in max_iter={self.max_iter} steps: residuals "
                f"{self.primal_residual_:.1e} (primal) and {self.dual_residual_:.1e} (dual) are above tol={tol:g}; "
                "increase max_iter, or scale the features",
                ConvergenceWarning,
                stacklevel=3,
            )


class NonconvexSVC(LinearClassifier):
    """Linear support vector classifier: mean hinge loss + sum_j p(w_j), with an unpenalised intercept.

    Parameters
    ----------
    penalty : {"scad", "mcp", "lsp", "capped_l1", "l1"}
        Penalty p; see `oases.svm.Penalty` for the formulas.
    lam : float
        Strength of the penalty; 0 for none.
    theta : float or None
        Shape of the penalty; None for 3.7 (scad, above 2), 3 (mcp), 0.1 (lsp), 0.5 (capped_l1). l1 ignores it.
    fit_intercept : bool
        Whether to fit an intercept.
    max_iter : int
        Maximum steps of all parts of the solver together, per binary problem.
    tol : float
        Residuals above it raise a ConvergenceWarning.
    class_weight : dict, "balanced" or None
        Factors of the sample weights by class.
    warm_start : bool
        Also start from the last coefficients.
    search : bool
        For a nonconvex penalty, search for the lowest of several stationary points; False for the one that reweighted
        linear programs reach from zero, which is faster.
    polish : bool
        False for ADMM alone, as published: it stops with both relative residuals below tol, but without certifying
        multipliers. With lsp and capped_l1 it may not converge, and warns.
    process_group : torch.distributed.ProcessGroup or None
        Group of ranks that have some of the rows each; every rank calls fit and gets the same result.

    Attributes
    ----------
    coef_ : [1, d], or [classes, d] for one-vs-rest
    intercept_ : [1] or [classes]
    classes_ : sorted labels
    objective_ : minimum found; one per class if there are more than two
    primal_residual_, dual_residual_ : see `oases_svm.solver.residuals`; the largest of all problems
    multipliers_ : [1 or classes, n], of the rows, which certify stationarity
    n_iter_ : steps taken; the largest number of all problems
    """

    def __init__(
        self,
        penalty: str = "scad",
        *,
        lam: float = 2**-6,
        theta: float | None = None,
        fit_intercept: bool = True,
        max_iter: int = MAX_ITER,
        tol: float = 1e-6,
        class_weight: Any = None,
        warm_start: bool = False,
        search: bool = True,
        polish: bool = True,
        process_group: Any = None,
    ) -> None:
        self.penalty = penalty
        self.lam = lam
        self.theta = theta
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.search = search
        self.polish = polish
        self.process_group = process_group

    def __sklearn_clone__(self) -> NonconvexSVC:
        """Clone with the same process group, which cannot be copied."""
        group, self.process_group = self.process_group, None
        try:
            twin: NonconvexSVC = super().__sklearn_clone__()
        finally:
            self.process_group = group
        twin.process_group = group
        return twin

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NonconvexSVC:
        """Fit to X [n, d], dense or sparse, labels y [n] of any kind and sample weights [n]."""
        ranks = explore = None
        if self.process_group is not None:
            from oases_svm.consensus import Ranks

            ranks = Ranks(self.process_group)
            explore = ranks.explore
        penalty = self._checked() if ranks is None else ranks.together(self._checked)
        last = getattr(self, "coef_", None) if self.warm_start else None
        problems = Problems(self, X, y, sample_weight, self.class_weight, self.fit_intercept, ranks)
        self.classes_ = problems.classes
        if last is not None and last.shape != (len(problems), problems.features):
            last = None  # of other data: no warm start
        found = []
        for i, design in enumerate(problems.designs()):
            start = None if last is None else last[i]
            if self.polish:
                found.append(solve(design, penalty, self.max_iter, start, explore, self.search))
            else:
                found.append(solve_plainly(design, penalty, self.max_iter, self.tol, start))
        self._keep(found, self.tol, [problems.spread(solution.multipliers) for solution in found])
        return self

    def _checked(self) -> Penalty:
        """The penalty. ValueError for parameters out of range."""
        check_steps(self.max_iter, self.tol)
        if self.process_group is not None and not self.polish:
            raise ValueError("polish=False does not support a process group; leave out process_group")
        return Penalty(self.penalty, self.lam, self.theta)


def check_steps(max_iter: Any, tol: Any) -> None:
    """Raise ValueError for fewer than 1 step or a tolerance that is not above 0."""
    if isinstance(max_iter, bool) or not isinstance(max_iter, (int, np.integer)) or max_iter < 1:
        raise ValueError(f"max_iter={max_iter!r} must be an integer of at least 1")
    if not isinstance(tol, (int, float, np.number)) or not 0 < tol < np.inf:
        raise ValueError(f"tol={tol!r} must be a number above 0")
