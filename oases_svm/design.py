"""Data of one binary problem for the solvers: y_i x_i, centred and scaled, dense or sparse.

Coefficients are found for columns (x_j - centre_j) / scale_j of mean square 1, which conditions the linear algebra
only: the penalty applies to the coefficients of x_j itself, and the unpenalised intercept absorbs the centres.
Without an intercept nothing is centred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse

from oases_svm.penalties import Floats

_CONSTANT = 1e-10
"""Fraction of a column's largest entry below which its spread is rounding and the column constant."""

_BLOCK = 256


class Design:
    """Columns computed on demand.

    x [n, d], float, dense or sparse; labels [n] of -1 and 1; weights [n] > 0 that sum to 1, over all ranks if x is
    a shard of the rows. moments: those of another design with this x and these weights. keys [n]: numbers that
    order the rows independently of their positions; None for the positions.
    """

    def __init__(
        self, x: Any, labels: Floats, weights: Floats, intercept: bool, moments: Any = None, keys: Any = None
    ) -> None:
        self.labels, self.weights, self.intercept = labels, weights, intercept
        self.x = x.tocsc() if sparse.issparse(x) else x
        self.features = int(x.shape[1])
        self.keys = np.arange(len(labels), dtype=float) if keys is None else keys
        self.moments: tuple[Floats, Floats, Any] = moments if moments is not None else self._moments()
        self.center: Floats = self.moments[0]
        self.scale: Floats = self.moments[1]
        self.usable: Any = self.moments[2]

    @property
    def rows(self) -> int:
        """Number of rows of `columns` and `correlate`."""
        return len(self.labels)

    def raw_columns(self, indices: Any) -> Floats:
        """y_i x_ij for these j: [n, len(indices)]."""
        picked = self.x[:, indices]
        picked = picked.toarray() if sparse.issparse(picked) else np.asarray(picked, dtype=float)
        return np.asarray(picked * self.labels[:, None])

    def columns(self, indices: Any) -> Floats:
        """y_i (x_ij - centre_j) / scale_j for these j: [n, len(indices)], column-major."""
        picked = self.x[:, indices]
        picked = picked.toarray(order="F") if sparse.issparse(picked) else np.array(picked, dtype=float, order="F")
        picked -= self.center[indices]
        picked /= self.scale[indices]
        picked *= self.labels[:, None]
        return np.asarray(picked)

    def correlate(self, multipliers: Floats) -> Floats:
        """sum_i multipliers_i y_i (x_ij - centre_j) / scale_j for every j: [d]."""
        signed = multipliers * self.labels
        total = self.x.T @ signed
        return np.where(self.usable, (total - self.center * signed.sum()) / self.scale, 0.0)

    def force(self, multipliers: Floats) -> Floats:
        """sum_i multipliers_i y_i x_ij for every j, of the given columns: [d]."""
        return np.asarray(self.x.T @ (multipliers * self.labels)).ravel()

    def margins(self, w: Floats, b: float) -> Floats:
        """y_i (x_i'w + b), of the given columns: [n]."""
        support = np.flatnonzero(w)
        picked = self.x if 4 * len(support) > self.features else self.x[:, support]
        w = w if picked is self.x else w[support]
        return np.asarray(self.labels * (np.asarray(picked @ w).ravel() + b))

    def _moments(self) -> tuple[Floats, Floats, Any]:
        """Centre, scale (root mean square about it) and usability (not constant) of each column."""
        mean = np.asarray(self.x.T @ self.weights).ravel() if self.intercept else np.zeros(self.features)
        return moments_from(mean, *spread_about(self.x, self.weights, mean))


def moments_from(mean: Floats, largest: Floats, squares: Floats) -> tuple[Floats, Floats, Any]:
    """Moments of a design from the columns' means and the results of `spread_about`."""
    spread = np.sqrt(np.maximum(squares, 0.0)) * largest
    usable = (spread > _CONSTANT * largest) & (largest > 0)
    return np.where(usable, mean, 0.0), np.where(usable, spread, 1.0), usable


def spread_about(
    x: Any, weights: Floats, mean: Floats, over_ranks: Callable[[Floats], Floats] = np.asarray
) -> tuple[Floats, Floats]:
    """For each column the largest |x_ij| (of all ranks), and the weighted squares about the mean in units of that."""
    if sparse.issparse(x):
        largest = over_ranks(np.asarray(np.abs(x).max(axis=0).todense()).ravel())
        safe = np.where(largest > 0, largest, 1.0)
        scaled = (x @ sparse.diags_array(1 / safe)).tocsr()
        # sum c (x - m)^2 = sum c x^2 - 2 m sum c x + m^2 sum c
        shift = mean / safe
        squares = np.asarray(scaled.multiply(scaled).T @ weights).ravel()
        squares += shift * (weights.sum() * shift - 2 * np.asarray(scaled.T @ weights).ravel())
        return largest, squares
    largest = over_ranks(np.maximum(x.max(axis=0), -x.min(axis=0)))
    safe = np.where(largest > 0, largest, 1.0)
    squares = np.zeros(x.shape[1])
    for start in range(0, len(x), _BLOCK):  # by blocks of rows, to limit copies
        part = (x[start : start + _BLOCK] - mean) / safe
        squares += weights[start : start + _BLOCK] @ np.square(part, out=part)
    return largest, squares
