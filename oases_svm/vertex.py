"""Exact minimum of a hinge loss with a weighted l1 penalty over some columns, by a walk between vertices.

    f(w) = sum_i c_i [t_i - h_i'w]_+  +  sum_j tau_j |w_j|

is a linear program whose simplex method needs neither the 2 n + 2 d additional variables nor a phase one: a vertex
is a set S of coefficients and as many rows E on the margin, h_i'w = t_i. From each, the steepest edge is followed
over all kinks to its minimum (a long step), where a row enters E or a coefficient leaves S. Ties, e.g. of equal
rows, are broken by targets t_i that differ from 1 by 1e-8; `solution` is for t = 1.
A vertex remains one when weights tau or columns change: a regularisation path, the linear programs of a nonconvex
penalty and column generation all continue from it. The walk itself is csrc/svm/walk.cpp.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from oases import _svm
from oases_svm.penalties import Floats

_TIES = 1e-8
_WITHOUT_PAUSE = 1e9
"""Multiplications, about a third of a second, between two checks for interrupts."""


@dataclass
class Budget:
    """Remaining steps of all parts of a fit together, and their work in multiplications."""

    limit: int
    used: int = 0
    work: float = 0.0
    allowed: float = math.inf

    @property
    def left(self) -> int:
        """Remaining steps."""
        return self.limit - self.used if self.work <= self.allowed else 0

    def spend(self, work: float) -> bool:
        """Take one step; False if none is left."""
        if not self.left:
            return False
        self.used += 1
        self.work += work
        return True

    @contextmanager
    def within(self, work: float) -> Iterator[None]:
        """Limit the work of the steps inside the context."""
        before, self.allowed = self.allowed, min(self.allowed, self.work + work)
        try:
            yield
        finally:
            self.allowed = before


class Vertex:
    """A vertex and its descent.

    columns [n, m], column-major, of mean square about 1; weights c [n]. free: the first column is the intercept's,
    i.e. the labels. Targets follow the order of keys [n].
    """

    def __init__(self, columns: Floats, weights: Floats, free: bool, keys: Any = None) -> None:
        n = len(weights)
        self._c = weights
        rank = np.empty(n, dtype=int)
        rank[np.argsort(np.arange(n) if keys is None else keys, kind="stable")] = np.arange(n)
        self._t = 1 + _TIES * (1 + np.random.default_rng(0).random(n)[rank])
        self._walk = _svm.Walk(columns, weights, self._t)
        if free:
            heavier = 1.0 if weights[columns[:, 0] > 0].sum() >= weights[columns[:, 0] < 0].sum() else -1.0
            self._walk.pair(0, int(np.where(columns[:, 0] == heavier, self._t, 0.0).argmax()))
        self._solution: tuple[Floats, Floats] | None = None
        self._refresh(reset=True)

    @property
    def h(self) -> Floats:
        """All columns, [n, m]."""
        return np.asarray(self._walk.columns)

    def add(self, columns: Floats) -> None:
        """Append columns [n, more] with zero coefficients."""
        self._walk.add(columns)
        self._solution = None

    def minimise(self, tau: Floats, budget: Budget, pivots: int = sys.maxsize) -> bool:
        """Walk to the minimum for weights tau [m] >= 0 (0 for the intercept); False if pivots or budget ran out."""
        self._walk.begin()
        self._solution = None
        while True:
            allowed = min(budget.allowed - budget.work, _WITHOUT_PAUSE)
            status, taken, work = self._walk.minimise(tau, min(pivots, budget.left), allowed)
            budget.used += taken
            budget.work += work
            pivots -= taken
            if status == _svm.Status.MINIMUM:
                return True
            if status == _svm.Status.REFRESH:
                self._refresh()
            elif pivots == 0 or budget.left == 0:
                return False

    def solution(self) -> tuple[Floats, Floats]:
        """Coefficients [m] for t = 1, and the multipliers [n] of the rows, in [0, c]."""
        if self._solution is not None:
            return self._solution
        walk = self._walk
        basis, tight, inverse, matrix = walk.basis, walk.tight, walk.inverse, walk.matrix
        ones = np.ones(len(tight))
        found = inverse @ ones
        for _ in range(2):  # iterative refinement
            found += inverse @ (ones - matrix @ found)
        w = np.zeros(self.h.shape[1])
        w[basis] = found
        multipliers = np.where(walk.active, self._c, 0.0)
        multipliers[tight] = np.clip(walk.multipliers, 0.0, self._c[tight])
        self._solution = w, multipliers
        return self._solution

    def _refresh(self, reset: bool = False) -> None:
        """Recompute inverse, coefficients and margins to remove accumulated rounding."""
        self._walk.refresh(np.linalg.inv(self._walk.matrix), reset)
