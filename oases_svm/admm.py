"""ADMM for the penalised hinge loss (Guan et al., arXiv 1809.03655).

    w = z,   H w + b y + xi = 1 + s,   xi, s >= 0

with exact proximal maps of any penalty. Beyond the paper: a hinge with weights c_i has the step size rho2 c_i for
its row, so that step sizes need not depend on n and duplicate rows act as one heavier row; over-relaxation;
residual balancing; a stopping rule on both residuals. Columns are scaled so that rho1 stays above the penalty's
weak-convexity modulus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oases_svm.factor import Matrix, NormalEquations
from oases_svm.penalties import Floats, Penalty
from oases_svm.vertex import Budget

RHO1, RHO2 = 1.0, 3.0
_RELAXED = 1.6
_CHECKED = 10
"""Steps between two checks of the residuals."""
_LEAST = 20
_UNBALANCED = 10.0
_BALANCED_UNTIL = 400
"""Steps after which rho stays fixed, as convergence requires."""
_ABOVE_MODULUS = 1.5


@dataclass
class Outcome:
    """z and b in units of the given columns, with relative residuals."""

    z: Floats
    b: float
    primal: float
    dual: float
    converged: bool


def least_scale(penalty: Penalty) -> float:
    """Minimum column scale that keeps rho1 above the modulus of weak convexity."""
    modulus = penalty.modulus if np.isfinite(penalty.modulus) else penalty.lam / penalty.shape
    return float(np.sqrt(_ABOVE_MODULUS * modulus / RHO1))


class Admm:
    """ADMM state, from which the next call continues.

    matrix: H [n, d], rows y_i x_i, columns divided by scale [d]; labels y [n]; weights c [n] that sum to 1.
    """

    def __init__(
        self, matrix: Matrix, labels: Floats, weights: Floats, scale: Floats, penalty: Penalty, intercept: bool
    ) -> None:
        n, d = matrix.shape
        self.matrix, self.labels, self.weights = matrix, labels, weights
        self.scale, self.penalty, self.intercept = scale, penalty, intercept
        self.b = 0.0
        self.z: Floats = np.zeros(d)
        self.u: Floats = np.zeros(d)
        self.xi: Floats = np.zeros(n)
        self.s: Floats = np.zeros(n)
        self.v: Floats = np.zeros(n)
        self.factor = 1.0
        self.equations = NormalEquations(matrix, weights, RHO1 / RHO2)

    def begin(self, z: Floats, b: float) -> None:
        """Start from these coefficients, in units of the columns."""
        self.z, self.b = z.copy(), b
        margin = self.matrix.times(z) + b * self.labels
        self.xi, self.s = np.maximum(1 - margin, 0.0), np.maximum(margin - 1, 0.0)

    def run(self, steps: int, tol: float, budget: Budget) -> Outcome:
        """Run at most `steps` steps, until both residuals are below tol."""
        primal = dual = np.inf
        for step in range(1, steps + 1):
            if not budget.spend(2.0 * self.matrix.shape[0] * self.matrix.shape[1]):
                break
            checked = step % _CHECKED == 0
            before = (self.z, self.s - self.xi)
            w, fitted = self._step()
            if not checked:
                continue
            primal, dual = self._residuals(w, fitted, *before)
            if step >= _LEAST and max(primal, dual) <= tol:
                return Outcome(self.z, self.b, primal, dual, True)
            if step <= _BALANCED_UNTIL:
                self._balance(primal, dual)
        return Outcome(self.z, self.b, float(primal), float(dual), False)

    def _step(self) -> tuple[Floats, Floats]:
        """Update all variables once, in the paper's order; returns w and H w + b y before relaxation."""
        y, c, rho = self.labels, self.weights, RHO1 / RHO2
        rho1, rho2 = self.factor * RHO1, self.factor * RHO2
        target = self.s + 1 - self.xi - self.v
        w = self.equations.solve(rho * (self.z - self.u) + self.matrix.correlate(c * (target - self.b * y)))
        product = self.matrix.times(w)
        if self.intercept:
            self.b = float(c @ (y * (target - product)))
        fitted = product + self.b * y
        relaxed_w = _RELAXED * w + (1 - _RELAXED) * self.z
        relaxed = _RELAXED * fitted + (1 - _RELAXED) * (1 + self.s - self.xi)
        self.z = self.scale * self.penalty.prox((relaxed_w + self.u) / self.scale, rho1 * self.scale**2)
        self.xi = np.maximum(0.0, 1 + self.s - self.v - relaxed - 1 / rho2)
        self.s = np.maximum(0.0, relaxed + self.xi - 1 + self.v)
        self.u = self.u + relaxed_w - self.z
        self.v = self.v + relaxed + self.xi - 1 - self.s
        return w, fitted

    def _residuals(self, w: Floats, fitted: Floats, z: Floats, slack: Floats) -> tuple[float, float]:
        c = self.weights
        gap = fitted + self.xi - 1 - self.s
        primal = np.sqrt(((w - self.z) ** 2).sum() + c @ gap**2)
        size = np.sqrt(max((w**2).sum() + c @ fitted**2, (self.z**2).sum() + c @ (1 + self.s - self.xi) ** 2))
        moved = self.matrix.correlate(c * (self.s - self.xi - slack))
        dual = self.factor * np.sqrt(((RHO1 * (self.z - z)) ** 2).sum() + ((RHO2 * moved) ** 2).sum())
        force = self.factor * RHO1 * np.sqrt((self.u**2).sum())
        return float(primal / (1 + size)), float(dual / (1 + force))

    def _balance(self, primal: float, dual: float) -> None:
        """Scale rho1 and rho2 together, which keeps the factorisation valid."""
        change = 2.0 if primal > _UNBALANCED * dual else 0.5 if dual > _UNBALANCED * primal else 1.0
        if change < 1 and self.factor * change < 1 and self.penalty.modulus > 0:
            return  # rho1 must stay above the modulus
        self.factor *= change
        self.u, self.v = self.u / change, self.v / change
