"""Classifier that chooses lambda by cross-validation or an information criterion."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.model_selection import check_cv
from sklearn.utils import indexable
from sklearn.utils.validation import _check_sample_weight, validate_data

from oases_svm.estimator import MAX_ITER, LinearClassifier, check_steps
from oases_svm.path import Path, grid, path_of
from oases_svm.penalties import Penalty
from oases_svm.problems import Problems


class NonconvexSVCCV(LinearClassifier):
    """NonconvexSVC with the lambda of the best accuracy on held-out folds, or of the lowest BIC.

    Parameters
    ----------
    penalty, theta, fit_intercept, max_iter, tol, class_weight :
        See NonconvexSVC.
    lams : array or None
        Candidate lambdas; None for n_lambdas of them, from the smallest with w = 0 down to eps times it.
    n_lambdas, eps :
        See lams.
    cv : int, splitter, iterable or None
        As in scikit-learn; None for five stratified folds.
    criterion : {"cv", "bic"}
        Ties go to the solution with the fewest non-zeros, then to the largest lambda.
    search : bool or None
        See NonconvexSVC; None to choose it, too.

    Attributes
    ----------
    lam_, search_ : chosen lambda and kind of solution
    lams_ : all lambdas, decreasing, [L]
    scores_ : accuracy by fold, [folds, L]; for "bic" the negated criterion, [1, L]
    path_ : the `oases.svm.Path` of all data
    coef_ and others : as in NonconvexSVC, of the solution of path_ with lam_

    scores_ and path_ are of the chosen kind of solution.
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
        search: bool | None = None,
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
        self.search = search

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NonconvexSVCCV:
        """Choose lambda and fit; arguments as in NonconvexSVC."""
        if self.criterion not in ("cv", "bic"):
            raise ValueError(f"criterion={self.criterion!r} is unknown; known are 'cv', 'bic'")
        check_steps(self.max_iter, self.tol)
        penalty = Penalty(self.penalty, 0.0, self.theta)
        problems = Problems(self, X, y, sample_weight, self.class_weight, self.fit_intercept)
        self.classes_ = problems.classes
        lams = grid(problems, penalty, self.lams, self.n_lambdas, self.eps)
        kinds = [False, True] if self.search is None and self.penalty != "l1" else [bool(self.search)]
        paths = {kind: path_of(problems, penalty, lams, self.max_iter, kind) for kind in kinds}
        if self.criterion == "bic":
            scores = {kind: -path.bic.sum(axis=0, keepdims=True) for kind, path in paths.items()}
        else:
            scores = self._scored(penalty, lams, paths, X, y, sample_weight)

        def merit(choice: tuple[bool, int]) -> tuple[float, int, int]:
            kind, k = choice
            return float(scores[kind].mean(axis=0)[k]), -int(paths[kind].nonzeros[:, k].sum()), -k

        self.search_, chosen = max(((kind, k) for kind in kinds for k in range(len(lams))), key=merit)
        self.path_, self.scores_ = paths[self.search_], scores[self.search_]
        self.lams_, self.lam_ = lams, float(lams[chosen])
        found = [solutions[chosen] for solutions in self.path_.solutions]
        self._keep(found, self.tol, [problems.spread(solution.multipliers) for solution in found])
        return self

    def _scored(
        self, penalty: Penalty, lams: Any, paths: dict[bool, Path], X: Any, y: Any, sample_weight: Any
    ) -> dict[bool, Any]:
        """Weighted accuracy of each fold's path on its held-out data: [folds, L], by kind of solution.

        If all coefficients of the path of all data are zero, those of the folds are set to zero, too; otherwise the
        score would be of another solution than the one to choose.
        """
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, reset=False)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        X, y = indexable(X, y)
        rows: dict[bool, list[Any]] = {kind: [] for kind in paths}
        for train, test in check_cv(self.cv, y, classifier=is_classifier(self)).split(X, y):
            if weights[test].sum() == 0:
                continue  # nothing to score
            # Of an estimator for this alone: self keeps its own feature names.
            problems = Problems(
                NonconvexSVCCV(), X[train], y[train], weights[train], self.class_weight, self.fit_intercept
            )  # fmt: skip
            for kind, whole in paths.items():
                path = path_of(problems, penalty, lams, self.max_iter, kind, whole.zeros)
                right = path.predict(X[test]) == y[test][:, None]
                rows[kind].append(np.average(right, axis=0, weights=weights[test]))
        if not all(rows.values()):
            raise ValueError(f"cv={self.cv!r} leaves no sample with a weight above 0 to score on")
        return {kind: np.stack(found) for kind, found in rows.items()}
