"""Contestants and data of the benchmark of support vector machines."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from oases_svm.design import Design
from oases_svm.estimator import NonconvexSVC
from oases_svm.path import svc_path
from oases_svm.penalties import THETAS, Penalty

DESIGNS = ("independent", "correlated", "blocks", "unbalanced", "noisy")
STRENGTHS = 20
"""Number of regularization strengths per contestant on a recovery design."""
_LEAST = 0.02
"""Last strength as a share of the largest one."""
_NEWTON_STEPS = 50
_TRUE = 10
_STEPS = 50
_SAME = 1e-9


@dataclass
class Split:
    """Labels of -1 and 1; support: the columns that matter, where that is known."""

    x: Any
    y: Any
    validation: tuple[Any, Any] | None = None
    test: tuple[Any, Any] | None = None
    support: Any = None


def reweighted(x: Any, y: Any, penalty: Penalty, limit: float | None = None) -> dict[str, Any]:
    """Local linear approximation from the l1 solution on, every step a linear program over all columns by HiGHS.

    limit: seconds for each program; where one is not solved in them, `complete` is False, the last answer stands.
    """
    n, d = x.shape
    signed = sparse.csc_array(sparse.diags_array(y) @ sparse.csc_array(x))
    label = sparse.csc_array(y[:, None])
    matrix = sparse.hstack([-signed, signed, -label, label, -sparse.eye_array(n)], format="csc")
    design = Design(x, y, np.full(n, 1 / n), True)
    weights, best, steps, start = np.full(d, penalty.lam), None, 0, time.perf_counter()
    complete = False
    while steps < _STEPS:
        cost = np.concatenate([weights, weights, [0.0, 0.0], design.weights])
        found = linprog(
            cost, A_ub=matrix, b_ub=-np.ones(n), bounds=(0, None), method="highs", options={"time_limit": limit}
        )
        steps += 1
        if found.status != 0:
            break
        w, b = found.x[:d] - found.x[d : 2 * d], float(found.x[2 * d] - found.x[2 * d + 1])
        value = float(design.weights @ np.maximum(0, 1 - design.margins(w, b))) + penalty.value(w)
        stuck = best is not None and value >= best[0] - _SAME
        if best is None or value < best[0]:
            best = (value, w, b)
        if stuck or penalty.name == "l1":
            complete = True
            break
        weights = penalty.slopes(w)
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "programs": steps, "complete": complete, "objective": None, "nonzeros": None}
    if best is not None:
        result |= {"objective": best[0], "nonzeros": int(np.count_nonzero(np.abs(best[1]) > 1e-7))}
    return result


def _median(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Return the last result, and the median time in seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = run()
        seconds.append(time.perf_counter() - start)
    return found, median(seconds)


def ours(x: Any, y: Any, penalty: Penalty, repeats: int, *, search: bool = True) -> dict[str, Any]:
    """A fit from the default settings; without search it is the descent of reweighted programs."""
    made = NonconvexSVC(penalty.name, lam=penalty.lam, theta=penalty.theta, search=search)
    model, seconds = _median(lambda: made.fit(x, y), repeats)
    return {
        "objective": model.objective_, "nonzeros": int(np.count_nonzero(model.coef_)),
        "primal_residual": model.primal_residual_, "dual_residual": model.dual_residual_, "seconds": seconds,
    }  # fmt: skip


def whole_path(x: Any, y: Any, penalty: Penalty, repeats: int) -> float:
    """Seconds of a path of 50 lambdas, the median."""
    return _median(lambda: svc_path(x, y, penalty=penalty.name, theta=penalty.theta), repeats)[1]


def breast_cancer() -> tuple[Split, float]:
    """scikit-learn's copy, 75 % of it, standardised; and lambda."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    x, labels = load_breast_cancer(return_X_y=True)
    x, rest, y, y_rest = train_test_split(x, 2.0 * labels - 1, train_size=0.75, random_state=0, stratify=labels)
    mean, spread = x.mean(0), x.std(0)
    return Split((x - mean) / spread, y, test=((rest - mean) / spread, y_rest)), 2.0**-6


def synthetic(kind: str, seed: int, rows: int = 200, columns: int = 500) -> Split:
    """Generate one of DESIGNS: rows to fit, as many to validate, ten times as many to test."""
    rng = np.random.default_rng([seed, DESIGNS.index(kind)])
    n = 12 * rows
    x = rng.standard_normal((n, columns))
    if kind in ("correlated", "unbalanced"):  # of neighbours 0.5
        for j in range(1, columns):
            x[:, j] = 0.5 * x[:, j - 1] + np.sqrt(0.75) * x[:, j]
    if kind == "blocks":  # of ten each, 0.7 within one
        shared = np.repeat(rng.standard_normal((n, -(-columns // 10))), 10, axis=1)[:, :columns]
        x = np.sqrt(0.7) * shared + np.sqrt(0.3) * x
    support = np.sort(rng.choice(columns, _TRUE, replace=False))
    w = np.zeros(columns)
    w[support] = rng.choice([-1.0, 1.0], _TRUE) * rng.uniform(0.7, 1.5, _TRUE)
    score = x @ w + (0.5 if kind != "noisy" else 1.5) * rng.standard_normal(n)
    y = np.where(score > (np.quantile(score, 0.75) if kind == "unbalanced" else 0.0), 1.0, -1.0)
    a, b, c = slice(0, rows), slice(rows, 2 * rows), slice(2 * rows, n)
    return Split(x[a], y[a], (x[b], y[b]), (x[c], y[c]), support)


def large(n: int, d: int, density: float, seed: int) -> Split:
    """Generate n rows of d columns, 50 of which are relevant. density: share of entries that are not zero."""
    rng = np.random.default_rng(seed)
    w = np.zeros(d)
    w[:50] = rng.choice([-1.0, 1.0], 50)
    if density == 1:
        x: Any = rng.standard_normal((n, d))
        score = x @ w + rng.standard_normal(n)
    else:
        x = sparse.random_array((n, d), density=density, rng=rng, data_sampler=rng.standard_normal, format="csr")
        score = np.asarray(x @ w) + 0.1 * rng.standard_normal(n)
    return Split(x, np.where(score > 0, 1.0, -1.0), support=np.arange(50))


Fit = Callable[[Split, Any], Iterator[tuple[Any, float]]]
"""From rows and falling strengths, of which 1 leaves about nothing: coefficients and intercepts."""


def contestants(penalties: list[str]) -> tuple[dict[str, Fit], list[str]]:
    """Fits by name, and those that are not installed."""
    found: dict[str, Fit] = {}
    for name in penalties:
        found[f"ours {name}"] = _ours(name)
        found[f"ours {name} path"] = _our_path(name)
    found["LinearSVC l1"] = _linear_svc
    if importlib.util.find_spec("skglm") is None:
        return found, ["skglm"]
    for name in ("MCPenalty", "SCAD"):
        found[f"skglm {name} logistic"] = _skglm(name)
    return found, []


def _largest(split: Split) -> float:
    """Largest absolute mean of y_i x_ij over the rows: about the slope of the mean hinge loss at zero."""
    return float(np.abs(split.x.T @ split.y).max() / len(split.y))


def _ours(name: str) -> Fit:
    def fit(split: Split, strengths: Any) -> Iterator[tuple[Any, float]]:
        slope = Penalty(name, 1.0).slope_at_zero
        for lam in _largest(split) / slope * strengths:
            model = NonconvexSVC(name, lam=float(lam)).fit(split.x, split.y)
            yield model.coef_[0], float(model.intercept_[0])

    return fit


def _our_path(name: str) -> Fit:
    def fit(split: Split, strengths: Any) -> Iterator[tuple[Any, float]]:
        slope = Penalty(name, 1.0).slope_at_zero
        for search in (False, True):
            path = svc_path(split.x, split.y, penalty=name, lams=_largest(split) / slope * strengths, search=search)
            yield from zip(path.coefs[0].T, path.intercepts[0].tolist(), strict=True)

    return fit


def _linear_svc(split: Split, strengths: Any) -> Iterator[tuple[Any, float]]:
    from sklearn.svm import LinearSVC

    for lam in 2 * _largest(split) * strengths:  # twice: its hinge is squared
        model = LinearSVC(penalty="l1", dual=False, C=1 / (len(split.y) * lam), max_iter=10_000)
        model.fit(split.x, split.y)
        yield model.coef_[0], float(model.intercept_[0])


def _skglm(name: str) -> Fit:
    def fit(split: Split, strengths: Any) -> Iterator[tuple[Any, float]]:
        from skglm import GeneralizedLinearEstimator, datafits, penalties
        from skglm.solvers import ProxNewton

        for lam in 0.5 * _largest(split) * strengths:  # half: the slope of the logistic loss
            # Where rows can be separated its objective has no minimum: the steps are bounded.
            model = GeneralizedLinearEstimator(
                datafits.Logistic(),
                getattr(penalties, name)(float(lam), THETAS["scad" if name == "SCAD" else "mcp"]),
                ProxNewton(fit_intercept=True, max_pn_iter=_NEWTON_STEPS),
            ).fit(split.x, split.y)
            yield np.ravel(model.coef_), float(np.ravel(model.intercept_)[0])

    return fit


def recovered(fit: Fit, split: Split) -> dict[str, float]:
    """The strength of best accuracy on the validation rows; then F1 of the support and accuracy on the test rows."""
    assert split.validation is not None
    assert split.test is not None
    best: tuple[Any, Any] | None = None
    start = time.perf_counter()
    for w, b in fit(split, np.geomspace(1.0, _LEAST, STRENGTHS)):
        nonzeros = int(np.count_nonzero(np.abs(w) > 1e-8))
        key = (_accuracy(w, b, split.validation), -nonzeros)
        if best is None or key > best[0]:
            best = (key, (w, b, nonzeros))
    seconds = time.perf_counter() - start
    assert best is not None
    w, b, nonzeros = best[1]
    true = int(np.count_nonzero(np.abs(w[split.support]) > 1e-8))
    return {
        "f1": 2 * true / (nonzeros + len(split.support)), "accuracy": _accuracy(w, b, split.test),
        "nonzeros": float(nonzeros), "seconds": seconds,
    }  # fmt: skip


def _accuracy(w: Any, b: float, rows: tuple[Any, Any]) -> float:
    return float(np.mean(np.where(rows[0] @ w + b > 0, 1.0, -1.0) == rows[1]))


def beside(data: str, name: str, split: Split, penalty: Penalty, repeats: int, limit: float | None) -> dict[str, Any]:
    """One penalty on the same data: ours, its descent without search, reweighted programs, a path."""
    own, other = ours(split.x, split.y, penalty, repeats), reweighted(split.x, split.y, penalty, limit)
    first = ours(split.x, split.y, penalty, repeats, search=False)
    path = whole_path(split.x, split.y, penalty, repeats) if limit is None else None
    known = other["objective"] is not None
    lower, first_lower = (
        bool(found["objective"] <= other["objective"] * (1 + _SAME)) if known else None for found in (own, first)
    )
    return {
        "data": data, "penalty": name, "lam": penalty.lam, "ours": own, "descent": first, "reweighted": other,
        "at_or_below": lower, "descent_at_or_below": first_lower, "speedup": other["seconds"] / own["seconds"],
        "descent_speedup": other["seconds"] / first["seconds"], "path_seconds": path,
        "path_fits": None if path is None else path / own["seconds"],
    }  # fmt: skip
