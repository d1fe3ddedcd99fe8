"""Conversion of user data to binary problems: validation, classes, weights, one design per class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from oases_svm.design import Design
from oases_svm.penalties import Floats

_SORTED = 2_000_000
"""Maximum number of entries for which rows are sorted."""
_BLOCK = 256


class Problems:
    """Rows with positive weight, their classes and weights, which sum to 1.

    ranks: of a process group whose ranks have some of the rows each; `oases_svm.consensus.Ranks`.
    """

    def __init__(
        self,
        estimator: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        class_weight: Any,
        intercept: bool,
        ranks: Any = None,
    ) -> None:
        check = partial(_checked, estimator, x, y, sample_weight, class_weight, ranks is not None)
        x, y, weights = check() if ranks is None else ranks.together(check)
        self.classes = np.unique(y) if ranks is None else ranks.union(np.unique(y), x.shape[1])
        codes = np.searchsorted(self.classes, y)
        unknown = set(class_weight or ()) - set(self.classes.tolist()) if isinstance(class_weight, dict) else set()
        if ranks is not None and unknown:
            raise ValueError(f"class_weight has {sorted(map(str, unknown))[0]}, which is no class of any rank")
        if len(self.classes) < 2:
            raise ValueError(
                f"{type(estimator).__name__} needs samples of at least 2 classes in the data, but the data contains "
                f"only one class: {self.classes[0]}"
            )
        self.counted = np.flatnonzero(weights > 0)
        self.samples, self.features = x.shape
        total = weights.sum() if ranks is None else float(ranks.sum(np.array([weights.sum()]))[0])
        if total == 0:
            raise ValueError("all rows have weight 0; give two classes a class_weight and sample_weight above 0")
        self.mass = total
        self._weights = weights[self.counted] / total
        self._codes = codes[self.counted]
        self._x = x if len(self.counted) == self.samples else x[self.counted]
        self._of_row = np.arange(len(self.counted))
        self._share = np.ones(len(self.counted))
        self._keys = _keys(self._x)
        if ranks is None:
            self._merge()
        self._intercept, self._ranks = intercept, ranks
        self._moments: Any = None  # of the columns, shared by all designs
        masses = np.bincount(self._codes, weights=self._weights, minlength=len(self.classes))
        masses = masses if ranks is None else ranks.sum(masses)
        if np.count_nonzero(masses) < 2:
            raise ValueError(
                f"{type(estimator).__name__} needs samples of at least 2 classes, but all weight is on one class: "
                f"{self.classes[masses.argmax()]}; a classifier needs two"
            )

    def __len__(self) -> int:
        return 1 if len(self.classes) == 2 else len(self.classes)

    def designs(self) -> Iterator[Design]:
        """One design for the second of two classes against the first, or one per class against the rest."""
        for positive in [1] if len(self.classes) == 2 else range(len(self.classes)):
            labels = np.where(self._codes == positive, 1.0, -1.0)
            if self._ranks is None:
                design = Design(self._x, labels, self._weights, self._intercept, self._moments, self._keys)
            else:
                from oases_svm.consensus import SharedDesign

                design = SharedDesign(self._x, labels, self._weights, self._intercept, self._ranks, self._moments)
            self._moments = design.moments
            yield design

    def spread(self, multipliers: Floats) -> Floats:
        """Expand multipliers of the rows with positive weight to all rows; with ranks, of all ranks' rows."""
        if self._ranks is not None:
            return multipliers
        every = np.zeros(self.samples)
        every[self.counted] = multipliers[self._of_row] * self._share
        return every

    def _merge(self) -> None:
        """Merge duplicate rows of a class, summing their weights.

        So a weight of 2 and a duplicated row are the same problem in every bit, not only at the minimum: of several
        stationary points the same one is found. For that, small data is also sorted.
        """
        order = np.lexsort((self._codes, self._keys))
        keys, codes = self._keys[order], self._codes[order]
        same = (keys[1:] == keys[:-1]) & (codes[1:] == codes[:-1])
        if not same.any() and self._x.shape[0] * self.features > _SORTED:
            return
        candidates = np.flatnonzero(same)
        for start in range(0, len(candidates), _BLOCK):
            part = candidates[start : start + _BLOCK]
            apart = self._x[order[part + 1]] - self._x[order[part]]
            differ = np.asarray(abs(apart).sum(axis=1)).ravel() != 0
            same[part[differ]] = False
        first = np.concatenate([[True], ~same])
        group = np.cumsum(first) - 1
        of_row: Any = np.empty_like(group)
        of_row[order] = group
        merged = np.bincount(of_row, weights=self._weights)
        self._of_row, self._share = of_row, self._weights / merged[of_row]
        kept = order[first]
        self._x, self._codes, self._weights, self._keys = self._x[kept], self._codes[kept], merged, self._keys[kept]


def _checked(
    estimator: Any, x: Any, y: Any, sample_weight: Any, class_weight: Any, shared: bool
) -> tuple[Any, Any, Floats]:
    """Valid rows, labels and weights. ValueError for others. shared: whether other ranks have rows, too."""
    x, y = validate_data(estimator, x, y, accept_sparse=("csr", "csc"), dtype=np.float64)
    check_classification_targets(y)
    weights = _check_sample_weight(sample_weight, x, dtype=np.float64)
    if np.any(weights < 0):
        raise ValueError(f"sample_weight must be 0 or more, got {weights.min()}")
    if class_weight is None:
        return x, y, weights
    if shared and class_weight == "balanced":
        raise ValueError("class_weight='balanced' does not support a process group; give a dict of weights")
    classes, codes = np.unique(y, return_inverse=True)
    if shared and isinstance(class_weight, dict):  # some of its classes may be on other ranks alone
        of_class = np.array([class_weight.get(name, 1.0) for name in classes.tolist()], dtype=np.float64)
    else:
        of_class = compute_class_weight(class_weight, classes=classes, y=y)
    for name, weight in zip(classes, of_class, strict=True):
        if not 0 <= weight < np.inf:
            raise ValueError(f"class_weight of class {name} must be finite and 0 or more, got {weight}")
    return x, y, weights * of_class[codes]


def _keys(x: Any) -> Floats:
    """Hash of each row: equal for equal rows, independent of their positions, and rarely equal otherwise."""
    direction = np.random.default_rng(1).standard_normal(x.shape[1])
    if sparse.issparse(x):
        return np.asarray(x.tocsr() @ direction)
    keys = np.empty(len(x))
    for start in range(0, len(x), _BLOCK):  # by blocks: a matrix product would round depending on the row's position
        keys[start : start + _BLOCK] = (x[start : start + _BLOCK] * direction).sum(axis=1)
    return keys
