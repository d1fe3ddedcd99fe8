"""How far a solution is from a first-order stationary point, computed from the data and nothing else.

With multipliers alpha_i in c_i times the subdifferential of the hinge, a stationary point has
    sum_i alpha_i y_i x_ij  in the subdifferential of p at w_j, for every j,    and    sum_i alpha_i y_i = 0.
"""

from __future__ import annotations

import numpy as np

from oases.svm.design import Design
from oases.svm.penalties import Floats, Penalty

_INSIDE = 1e-9
"""Of c_i: a multiplier nearer to 0 or c_i than that is there."""


def residuals(
    design: Design, margin: Floats, w: Floats, multipliers: Floats, penalty: Penalty
) -> tuple[float, float]:
    """(primal, dual), each the largest violation, of coefficients w with these margins [n].

    Primal, in units of the margin: a row whose multiplier is below c_i must not be inside the margin, one whose
    multiplier is above 0 not outside. Dual, in units of the penalty's slope: the distance to the subdifferential at
    any coordinate, and |sum alpha y| with an intercept.
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
