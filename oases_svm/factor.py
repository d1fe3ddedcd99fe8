"""Normal equations of the w-update: (H'CH + rho I) w = d, factorised once per rho.

n >= d: Cholesky of d x d. n < d: Cholesky of n x n by Woodbury's identity (arXiv 1809.03655, section 3). Sparse
data with large n and d: conjugate gradients with warm starts, without a factor.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from scipy import linalg, sparse
from scipy.sparse.linalg import LinearOperator, cg

from oases_svm.design import Design
from oases_svm.penalties import Floats

FACTORISED = 3000
"""Maximum number of rows or columns of sparse data for a dense factor."""
_RESIDUAL = 1e-10


class Matrix(Protocol):
    """H [n, d] as a linear operator."""

    shape: tuple[int, int]
    factorised: bool

    def times(self, w: Floats) -> Floats:
        """H w."""

    def correlate(self, v: Floats) -> Floats:
        """H'v."""

    def gram(self, weights: Floats) -> Floats:
        """H'CH."""

    def outer(self) -> Floats:
        """HH'."""


class DenseMatrix:
    """H as a dense array."""

    factorised = True

    def __init__(self, h: Floats) -> None:
        self.h, self.shape = h, (h.shape[0], h.shape[1])

    def times(self, w: Floats) -> Floats:
        """H w."""
        return np.asarray(self.h @ w)

    def correlate(self, v: Floats) -> Floats:
        """H'v."""
        return np.asarray(self.h.T @ v)

    def gram(self, weights: Floats) -> Floats:
        """H'CH."""
        root = self.h * np.sqrt(weights)[:, None]
        return np.asarray(root.T @ root)

    def outer(self) -> Floats:
        """HH'."""
        return np.asarray(self.h @ self.h.T)


class SparseMatrix:
    """Columns of a design, implicitly centred to keep their sparsity."""

    def __init__(self, design: Design) -> None:
        self.design, self.shape = design, (design.rows, design.features)
        self.factorised = min(self.shape) <= FACTORISED
        self._shift = design.center / design.scale

    def times(self, w: Floats) -> Floats:
        """H w."""
        design = self.design
        w = np.where(design.usable, w / design.scale, 0.0)
        return np.asarray(design.labels * (design.x @ w - design.center @ w))

    def correlate(self, v: Floats) -> Floats:
        """H'v."""
        return self.design.correlate(v)

    def gram(self, weights: Floats) -> Floats:
        """H'CH."""
        x, shift = self._scaled(), self._shift
        mean = x.T @ weights
        whole = np.asarray((x.T @ sparse.diags_array(weights) @ x).todense())
        return np.asarray(
            whole - np.outer(mean, shift) - np.outer(shift, mean) + weights.sum() * np.outer(shift, shift)
        )

    def outer(self) -> Floats:
        """HH'."""
        x, shift = self._scaled(), self._shift
        beside = x @ shift
        whole = np.asarray((x @ x.T).todense()) - beside[:, None] - beside + shift @ shift
        return np.asarray(self.design.labels[:, None] * whole * self.design.labels)

    def _scaled(self) -> Any:
        keep = np.where(self.design.usable, 1 / self.design.scale, 0.0)
        return (self.design.x @ sparse.diags_array(keep)).tocsr()


class NormalEquations:
    """Solver for one rho, H and row weights C = diag(weights), all above 0."""

    def __init__(self, matrix: Matrix, weights: Floats, rho: float) -> None:
        self.matrix, self.weights, self.rho = matrix, weights, rho
        n, d = matrix.shape
        self.wide = n < d
        self._last = np.zeros(d)
        if not matrix.factorised:
            self._factor: Any = None
        elif self.wide:
            inner = matrix.outer() / rho
            inner[np.diag_indices(n)] += 1 / weights
            self._factor = linalg.cho_factor(inner, overwrite_a=True)
        else:
            inner = matrix.gram(weights)
            inner[np.diag_indices(d)] += rho
            self._factor = linalg.cho_factor(inner, overwrite_a=True)

    def solve(self, right: Floats) -> Floats:
        """Solution w for the right-hand side d."""
        if self._factor is None:
            return self._iterate(right)
        if not self.wide:
            return np.asarray(linalg.cho_solve(self._factor, right))
        inner = linalg.cho_solve(self._factor, self.matrix.times(right) / self.rho)
        return (right - self.matrix.correlate(inner)) / self.rho

    def _iterate(self, right: Floats) -> Floats:
        """Solve by conjugate gradients. Raises RuntimeError if they do not converge."""
        d = len(right)

        def product(w: Floats) -> Floats:
            return self.matrix.correlate(self.weights * self.matrix.times(w)) + self.rho * w

        operator = LinearOperator((d, d), matvec=product, dtype=float)
        w, failed = cg(operator, right, x0=self._last, rtol=_RESIDUAL, maxiter=10 * d)
        if failed:
            raise RuntimeError(f"conjugate gradients did not reach {_RESIDUAL} in {10 * d} steps; scale the features")
        self._last = np.asarray(w)
        return self._last
