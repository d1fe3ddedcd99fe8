"""How far a solution is from a first-order stationary point, computed from the data and nothing else.

With multipliers alpha_i in c_i times the subdifferential of the hinge, a stationary point has
    sum_i alpha_i y_i x_ij  in the subdifferential of p at w_j, for every j,    and    sum_i alpha_i y_i = 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oases.svm.penalties import Floats, Penalty

_INSIDE = 1e-9


def residuals(
    x: Any, labels: Floats, weights: Floats, coefficients: tuple[Floats, float], multipliers: Floats,
    penalty: Penalty, intercept: bool,
) -> tuple[float, float]:  # fmt: skip
    """(primal, dual), each the largest violation.

    Primal, in units of the margin: a row whose multiplier is below c_i must not be inside the margin, one whose
    multiplier is above 0 not outside. Dual, in units of the penalty's slope: the distance to the subdifferential at
    any coordinate, and |sum alpha y| with an intercept.
    """
    w, b = coefficients
    margin = labels * (np.asarray(x @ w).ravel() + b)
    short = np.where(multipliers < (1 - _INSIDE) * weights, 1 - margin, 0.0)
    beyond = np.where(multipliers > _INSIDE * weights, margin - 1, 0.0)
    primal = max(0.0, float(short.max(initial=0.0)), float(beyond.max(initial=0.0)))
    force = np.asarray(x.T @ (multipliers * labels)).ravel()
    return primal, stationarity(force, float(multipliers @ labels), w, penalty, intercept)


def stationarity(force: Floats, balance: float, w: Floats, penalty: Penalty, intercept: bool) -> float:
    """The dual residual from the forces sum_i alpha_i y_i x_ij and sum_i alpha_i y_i."""
    low, high = penalty.subdifferential(w)
    dual = float(np.maximum(np.maximum(low - force, force - high), 0.0).max(initial=0.0))
    return max(dual, abs(balance)) if intercept else dual


def objective(x: Any, labels: Floats, weights: Floats, w: Floats, b: float, penalty: Penalty) -> float:
    """sum_i c_i [1 - y_i (x_i'w + b)]_+ + sum_j p(w_j)."""
    margin = labels * (np.asarray(x @ w).ravel() + b)
    return float(weights @ np.maximum(0.0, 1 - margin)) + penalty.value(w)
