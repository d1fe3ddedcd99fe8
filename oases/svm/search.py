"""Changes of one coefficient from which the descent may come to a lower stationary point."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oases.svm.design import Design
from oases.svm.penalties import Floats, Penalty
from oases.svm.polish import Point, Polish

_TRIED = 1000
_ALIKE = 9
_LIKE = 0.2
"""The least correlation of columns one of which is tried for the other."""
_BETTER = 1e-9


def improved(polish: Polish, penalty: Penalty, best: Point) -> Point:
    """Descend with one coefficient set to zero, or given to a column like its own, as long as that helps.

    The smallest first; while the budget of `polish` allows.
    """
    tries, helped = 0, True
    while helped:
        helped = False
        for j in np.argsort(np.abs(best.w) * polish.design.scale):
            if best.w[j] == 0:  # or no longer another
                continue
            for start in _without(polish.design, best.w, int(j)):
                if tries == _TRIED or not polish.budget.left:
                    return best
                tries += 1
                found = polish.descend(penalty, start, priced=False)
                if found.settled and found.objective < best.objective * (1 - _BETTER):
                    best, helped = found, True
                    break
    return best


def _without(design: Design, w: Floats, j: int) -> Iterator[Floats]:
    """w without its coefficient j, then with that moved to each of the columns most like column j."""
    start = w.copy()
    start[j] = 0.0
    yield start
    column = design.columns(np.array([j]))[:, 0]
    likeness = design.correlate(design.weights * column)
    likeness[w != 0] = 0.0
    for k in np.argsort(-np.abs(likeness))[:_ALIKE]:
        if abs(likeness[k]) < _LIKE:
            return
        moved = start.copy()
        moved[k] = np.sign(likeness[k]) * w[j] * design.scale[j] / design.scale[k]
        yield moved
