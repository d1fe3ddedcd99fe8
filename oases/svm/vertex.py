"""Exact minimum of a hinge loss with a weighted l1 penalty, over some columns, by walking from vertex to vertex.

    f(w) = sum_i c_i [t_i - h_i'w]_+  +  sum_j tau_j |w_j|

is a linear programme, and its simplex method needs neither its 2 n + 2 d further variables nor a start by phases: a
vertex is a set S of coefficients and as many rows E that lie on the margin, h_i'w = t_i. From each, the edge of
steepest descent is followed over all kinks up to its minimum (a long step), where a row enters E or a coefficient
leaves S. Ties, as of equal rows, are broken by targets t_i that differ from 1 by 1e-8; `solution` is for t = 1.

A vertex stays one when weights tau or columns change: a regularisation path, the linear programmes of a nonconvex
penalty and column generation all walk on from where they are.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from oases.svm.penalties import Floats

_TIES = 1e-8
_RATE = 1e-11
"""Rates of change below it count as none: columns have mean square 1."""
_FLAT = 1e-10
"""A slope below that part of the first one is none: where all rows are passed, rounding alone is left of it."""
_REFRESH = 100
"""Pivots, or as many as there are coefficients where that is more, after which the inverse is computed anew."""
_CHECKED = 20
_DRIFT = 1e-10
_PRICED = 6
"""Columns whose edges are measured exactly in the search of the steepest one."""


@dataclass
class Budget:
    """Steps that may still be taken, by all parts of a fit together."""

    limit: int
    used: int = 0

    @property
    def left(self) -> int:
        """Steps left."""
        return self.limit - self.used

    def spend(self) -> bool:
        """Take one; False where there is none left."""
        if self.used >= self.limit:
            return False
        self.used += 1
        return True


class Vertex:
    """A vertex and the way down from it.

    columns [n, m] in Fortran's order, of mean square about 1; weights c [n]. With `free` the first column is the
    intercept's, the labels themselves. Targets follow the order of keys [n].
    """

    def __init__(self, columns: Floats, weights: Floats, free: bool, keys: Any = None) -> None:
        n = len(weights)
        self.store, self.c, self.free = columns, weights, free
        self.h = columns
        rank = np.empty(n, dtype=int)
        rank[np.argsort(np.arange(n) if keys is None else keys, kind="stable")] = np.arange(n)
        self.t = 1 + _TIES * (1 + np.random.default_rng(0).random(n)[rank])
        self.s: list[int] = []
        self.e: list[int] = []
        # B^-1 and the rows of E, each the corner of an array with room to grow.
        self._inverse: Floats = np.zeros((16, 16))
        self._rows: Floats = np.zeros((16, columns.shape[1]))
        self.w: Floats = np.zeros(columns.shape[1])
        self.sign: Floats = np.zeros(columns.shape[1])
        self.pull: Floats = np.zeros(columns.shape[1])
        self.basic: Floats = np.empty((n, 16), order="F")
        self.active = np.ones(n, dtype=bool)
        if free:
            heavier = 1.0 if weights[columns[:, 0] > 0].sum() >= weights[columns[:, 0] < 0].sum() else -1.0
            row = int(np.where(columns[:, 0] == heavier, self.t, 0.0).argmax())
            self.s, self.e = [0], [row]
            self.basic[:, 0] = columns[:, 0]
            self._rows[0] = columns[row]
        self._refresh(reset=True)

    @property
    def inverse(self) -> Floats:
        """Of the matrix of rows E and columns S."""
        k = len(self.s)
        return self._inverse[:k, :k]

    @property
    def rows(self) -> Floats:
        """The rows E of all columns."""
        return self._rows[: len(self.e)]

    def add(self, columns: Floats) -> None:
        """Append columns [n, more], with coefficients of zero."""
        (n, m), more = self.h.shape, columns.shape[1]
        if m + more > self.store.shape[1]:
            self.store = np.empty((n, 2 * (m + more)), order="F")
            self.store[:, :m] = self.h
        self.store[:, m : m + more] = columns
        self.h = self.store[:, : m + more]
        self._rows = np.concatenate([self._rows, np.zeros((len(self._rows), more))], axis=1)
        self._rows[: len(self.e), m:] = columns[self.e]
        self.w = np.concatenate([self.w, np.zeros(more)])
        self.sign = np.concatenate([self.sign, np.zeros(more)])
        self.pull = np.concatenate([self.pull, columns.T @ self._inside()])

    def minimise(self, tau: Floats, budget: Budget, pivots: int = sys.maxsize) -> bool:
        """Walk to the minimum for weights tau [m] >= 0 (0 of the intercept); False where pivots or budget ended."""
        self.sign[self.s] = np.where(self.w[self.s] != 0, np.sign(self.w[self.s]), 1.0)
        since, fresh = 0, False
        for _ in range(pivots):
            if since >= max(_REFRESH, len(self.s)) or (since % _CHECKED == _CHECKED - 1 and self._drifted()):
                self._refresh()
                since, fresh = 0, True
            edge = self._edge(tau)
            if edge is None:
                if since == 0 or not self._drifted():
                    return True
                self._refresh()
                since, fresh = 0, True
                continue
            if not budget.spend():
                break
            if not self._walk(tau, *edge):
                if fresh:  # what is left to gain is rounding
                    return True
                self._refresh()
                since, fresh = 0, True
                continue
            since, fresh = since + 1, False
        self._weigh(tau)
        return False

    def solution(self) -> tuple[Floats, Floats]:
        """Coefficients [m] for t = 1, and the multipliers [n] of the rows, in [0, c]."""
        w, ones = np.zeros_like(self.w), np.ones(len(self.e))
        found = self.inverse @ ones
        if self.e:
            matrix = self._matrix()
            for _ in range(2):  # of refinement
                found += self.inverse @ (ones - matrix @ found)
        w[self.s] = found
        multipliers = np.where(self.active, self.c, 0.0)
        multipliers[self.e] = np.clip(self.multipliers, 0.0, self.c[self.e])
        return w, multipliers

    def _matrix(self) -> Floats:
        return np.asarray(self.rows[:, self.s])

    def _drifted(self) -> bool:
        """Whether rounding has left coefficients, or the inverse, inexact."""
        t = self.t[self.e]
        matrix = self._matrix()
        apart = np.abs(matrix @ self.w[self.s] - t).max(initial=0.0)
        return bool(max(apart, np.abs(matrix @ (self.inverse @ t) - t).max(initial=0.0)) > _DRIFT)

    def _inside(self) -> Floats:
        """c_i of the rows inside the margin, those of E apart; `pull` is the sum of their c_i h_i."""
        inside = np.where(self.active, self.c, 0.0)
        inside[self.e] = 0.0
        return inside

    def _refresh(self, reset: bool = False) -> None:
        """Compute inverse, coefficients and margins anew, free of what rounding has added up to."""
        k = len(self.s)
        matrix = self._matrix()
        if k:
            self.inverse[:] = np.linalg.inv(matrix)
        self.w[:] = 0.0
        self.w[self.s] = self.inverse @ self.t[self.e]
        self.slack = self.t - self.basic[:, :k] @ self.w[self.s]
        self.slack[self.e] = 0.0
        wrong = self.active != (self.slack > 0)
        wrong &= np.abs(self.slack) > (0.0 if reset else 10 * _RATE)
        self.active[wrong] = self.slack[wrong] > 0
        self.active[self.e] = False
        basic = np.asarray(self.s, dtype=int)
        self.sign[basic] = np.where(self.w[basic] != 0, np.sign(self.w[basic]), self.sign[basic])
        self.pull = self.h.T @ self._inside()

    def _weigh(self, tau: Floats) -> None:
        """Compute the multipliers of the rows E."""
        self.multipliers = self.inverse.T @ (tau[self.s] * self.sign[self.s] - self.pull[self.s])

    def _edge(self, tau: Floats) -> tuple[int, int, Floats, float] | None:
        """The edge of about steepest descent.

        (place in E of the row that leaves or -1, column that enters or -1, direction of the coefficients S, slope).
        """
        s, e = self.s, self.e
        self._weigh(tau)
        best, steepest = None, 0.0
        rows = self.rows
        gain = np.abs(self.pull + rows.T @ self.multipliers) - tau - 10 * _RATE
        gain[s] = -1.0
        count = min(_PRICED, len(gain))
        if count:
            candidates = np.argpartition(-gain, count - 1)[:count]
            candidates = candidates[gain[candidates] > 0]
            if len(candidates):
                toward = self.inverse @ rows[:, candidates]
                speed = gain[candidates] / np.sqrt(1 + (toward**2).sum(0))
                pick = int(speed.argmax())
                j, steepest = int(candidates[pick]), float(speed[pick])
                sign = np.sign(self.pull[j] + rows[:, j] @ self.multipliers)
                best = (-1, j, -sign * toward[:, pick], -float(gain[j] + 10 * _RATE))
        if e:
            c = self.c[e]
            over = np.maximum(-self.multipliers, self.multipliers - c)
            over[over <= 1e-9 * c] = 0.0
            count = min(_PRICED, len(over))
            candidates = np.argpartition(-over, count - 1)[:count]
            speed = over[candidates] / np.sqrt((self.inverse[:, candidates] ** 2).sum(0))
            pick = int(speed.argmax())
            if speed[pick] > steepest:
                place = int(candidates[pick])
                sign = 1.0 if self.multipliers[place] < 0 else -1.0
                best = (place, -1, sign * self.inverse[:, place], -float(over[place]))
        return best

    def _walk(self, tau: Floats, place: int, entering: int, direction: Floats, slope: float) -> bool:
        """Follow an edge to its minimum and pivot there; False where nothing stops it, which is rounding."""
        s, e, k = self.s, self.e, len(self.s)
        rates = self.basic[:, :k] @ direction
        sign = 0.0
        if entering >= 0:
            sign = float(np.sign(self.pull[entering] + self.rows[:, entering] @ self.multipliers))
            rates += sign * self.h[:, entering]
        moving = np.where(self.active, rates, -rates)
        moving[e] = 0.0
        meets = np.flatnonzero(moving > _RATE)
        coordinates = np.flatnonzero((direction * self.sign[s] < -_RATE) & (tau[s] > 0))
        times = np.concatenate([
            np.maximum(self.slack[meets] / rates[meets], 0.0),
            np.maximum(-self.w[s][coordinates] / direction[coordinates], 0.0),
        ])  # fmt: skip
        bends = np.concatenate(
            [self.c[meets] * moving[meets], 2 * tau[s][coordinates] * np.abs(direction[coordinates])]
        )
        passed, stop = _long_step(times, bends, slope)
        if stop < 0:
            return False
        time, rowwise = times[stop], len(meets)
        # Rows and coefficients that are passed change sides.
        crossed = meets[passed[passed < rowwise]]
        flipped = [s[i] for i in coordinates[passed[passed >= rowwise] - rowwise]]
        self.sign[flipped] *= -1
        self.w[s] += time * direction
        self.slack -= time * rates
        self.slack[[row for i, row in enumerate(e) if i != place]] = 0.0
        change = np.where(self.active[crossed], -self.c[crossed], self.c[crossed])
        self.active[crossed] ^= True
        if stop < rowwise:
            row = int(meets[stop])
            if self.active[row]:
                crossed, change = np.append(crossed, row), np.append(change, -self.c[row])
            self.active[row] = False
        if place >= 0:
            left = e[place]
            if self.multipliers[place] > 0:
                self.active[left] = True
                crossed, change = np.append(crossed, left), np.append(change, self.c[left])
        if entering >= 0:
            self.w[entering], self.sign[entering] = time * sign, sign
        if len(crossed):
            self.pull += self.h[crossed].T @ change
        if stop < rowwise:
            self._row_enters(row, place, entering)
        else:
            self._coefficient_leaves(int(coordinates[stop - rowwise]), place, entering)
        return True

    def _row_enters(self, row: int, place: int, entering: int) -> None:
        k = len(self.s)
        inverse, basic = self.inverse, self.basic[row, :k]
        beside = basic @ inverse
        if entering < 0:
            pivot = beside[place]
            beside[place] -= 1
            inverse -= np.outer(inverse[:, place], beside / pivot)
        else:
            column = inverse @ self.rows[:, entering]
            corner = self.h[row, entering] - basic @ column
            self._grow(k + 1)
            inverse = self._inverse
            inverse[:k, :k] += np.outer(column, beside / corner)
            inverse[:k, k], inverse[k, :k], inverse[k, k] = -column / corner, -beside / corner, 1 / corner
            self.basic[:, k] = self.h[:, entering]
            self.s.append(entering)
            self.e.append(row)
            place = k
        self.e[place] = row
        self._rows[place] = self.h[row]
        self.slack[row] = 0.0

    def _coefficient_leaves(self, index: int, place: int, entering: int) -> None:
        inverse, gone = self.inverse, self.s[index]
        if entering >= 0:
            column = inverse @ self.rows[:, entering]
            pivot = column[index]
            column[index] -= 1
            inverse -= np.outer(column, inverse[index] / pivot)
            self.s[index] = entering
            self.basic[:, index] = self.h[:, entering]
        else:
            inverse -= np.outer(inverse[:, place], inverse[index] / inverse[index, place])
            last = len(self.s) - 1
            # The last coefficient and the last row take the places of those that left.
            inverse[index], inverse[:, place] = inverse[last], inverse[:, last]
            self.s[index], self.e[place] = self.s[last], self.e[last]
            self.basic[:, index] = self.basic[:, last]
            self._rows[place] = self._rows[last]
            del self.s[last], self.e[last]
        self.w[gone], self.sign[gone] = 0.0, 0.0

    def _grow(self, k: int) -> None:
        """Have room for k coefficients."""
        room = len(self._inverse)
        if k > room:
            self._inverse = np.pad(self._inverse, (0, room))
            self._rows = np.pad(self._rows, ((0, room), (0, 0)))
        if k > self.basic.shape[1]:
            self.basic = np.asfortranarray(np.concatenate([self.basic, np.empty_like(self.basic)], axis=1))


def _long_step(times: Floats, bends: Floats, slope: float) -> tuple[Any, int]:
    """The kinks passed and the one where the slope turns from negative; -1 where it never does."""
    count = len(times)
    near = min(256, count)
    while near:
        chosen = np.argpartition(times, near - 1)[:near] if near < count else np.arange(count)
        order = chosen[np.argsort(times[chosen], kind="stable")]
        slopes = slope + np.cumsum(bends[order])
        turn = int(np.searchsorted(slopes >= _FLAT * slope, True))
        if turn < near:
            return order[:turn], int(order[turn])
        if near == count:
            break
        near = min(16 * near, count)
    return np.zeros(0, dtype=int), -1
