"""The classifier whose lambda is chosen, by cross-validation or an information criterion."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.model_selection import check_cv
from sklearn.utils import indexable
from sklearn.utils.validation import _check_sample_weight, validate_data

from oases.svm.estimator import MAX_ITER, LinearClassifier, check_steps
from oases.svm.path import path_of
from oases.svm.penalties import Penalty
from oases.svm.problems import Problems
from oases.svm.solver import solve


class NonconvexSVCCV(LinearClassifier):
    """NonconvexSVC with the lambda of best accuracy on held-out folds, or of least BIC.

    Parameters
    ----------
    penalty, theta, fit_intercept, max_iter, tol, class_weight :
        As of NonconvexSVC.
    lams : array or None
        The lambdas to choose from; None for n_lambdas of them, from the least with w = 0 down to eps of it.
    n_lambdas, eps :
        See lams.
    cv : int, splitter, iterable or None
        As everywhere in scikit-learn; None for five stratified folds.
    criterion : {"cv", "bic"}
        Of equal lambdas, the largest is taken.

    Attributes
    ----------
    lam_ : the lambda chosen
    lams_ : all of them, falling, [L]
    scores_ : accuracy by fold, [folds, L]; of "bic": the criterion with the opposite sign, [1, L]
    path_ : the `oases.svm.Path` of all data
    coef_ and the rest : as of NonconvexSVC, fitted to all data with lam_
    """

    def __init__(
        self,
        penalty: str = "scad",
        *,
        theta: float | None = None,
        lams: Any = None,
        n_lambdas: int = 50,
        eps: float = 1e-2,
        cv: Any = None,
        criterion: str = "cv",
        fit_intercept: bool = True,
        max_iter: int = MAX_ITER,
        tol: float = 1e-6,
        class_weight: Any = None,
    ) -> None:
        self.penalty = penalty
        self.theta = theta
        self.lams = lams
        self.n_lambdas = n_lambdas
        self.eps = eps
        self.cv = cv
        self.criterion = criterion
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NonconvexSVCCV:
        """Choose lambda and fit; arguments as of NonconvexSVC."""
        if self.criterion not in ("cv", "bic"):
            raise ValueError(f"criterion={self.criterion!r} is unknown; known are 'cv', 'bic'")
        check_steps(self.max_iter, self.tol)
        penalty = Penalty(self.penalty, 0.0, self.theta)
        problems = Problems(self, X, y, sample_weight, self.class_weight, self.fit_intercept)
        self.classes_ = problems.classes
        self.path_ = path_of(problems, penalty, self.lams, self.n_lambdas, self.eps, self.max_iter)
        self.lams_ = self.path_.lams
        if self.criterion == "bic":
            self.scores_ = -self.path_.bic.sum(axis=0, keepdims=True)
        else:
            self.scores_ = self._scored(penalty, X, y, sample_weight)
        chosen = int(self.scores_.mean(axis=0).argmax())
        self.lam_ = float(self.lams_[chosen])
        at = Penalty(self.penalty, self.lam_, self.theta)
        found = [
            solve(design, at, self.max_iter, self.path_.coefs[i, :, chosen], None)
            for i, design in enumerate(problems.designs())
        ]
        self._keep(found, self.tol, [problems.spread(solution.multipliers) for solution in found])
        return self

    def _scored(self, penalty: Penalty, X: Any, y: Any, sample_weight: Any) -> Any:
        """Weighted accuracy of each fold's path on what the fold leaves out: [folds, L]."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, reset=False)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        X, y = indexable(X, y)
        rows = []
        for train, test in check_cv(self.cv, y, classifier=is_classifier(self)).split(X, y):
            if weights[test].sum() == 0:
                continue  # nothing to score
            problems = Problems(
                _Fold(), X[train], y[train], weights[train], self.class_weight, self.fit_intercept
            )  # fmt: skip
            path = path_of(problems, penalty, self.lams_, self.n_lambdas, self.eps, self.max_iter)
            right = path.predict(X[test]) == y[test][:, None]
            rows.append(np.average(right, axis=0, weights=weights[test]))
        if not rows:
            raise ValueError(f"cv={self.cv!r} leaves no sample with a weight above 0 to score on")
        return np.stack(rows)


class _Fold(LinearClassifier):
    """What the data of a fold are validated for, so that the classifier keeps the names of its own."""
