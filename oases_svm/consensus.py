"""Data-parallel fits: every rank of a process group has some of the rows (after Guan et al., FITEE 21(4), 2020).

Consensus ADMM: each rank solves for its own coefficients on its rows, and the proximal map of their mean makes them
agree, at d + 1 numbers per step. The descent gathers a few columns and sums matrix-vector products. Every rank
takes the same steps and has the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from oases_svm.admm import RHO1, RHO2, least_scale
from oases_svm.design import Design, moments_from, spread_about
from oases_svm.factor import DenseMatrix, NormalEquations
from oases_svm.penalties import Floats, Penalty
from oases_svm.polish import Polish

T = TypeVar("T")

_STEPS = 200
_CHECKED = 10
_ROUGH = 1e-3


class Ranks:
    """Collectives over a torch process group. Raises ImportError if torch is not available."""

    def __init__(self, group: Any) -> None:
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise ImportError(
                f"process_group={group!r} needs torch; install it, or leave out process_group"
            ) from error
        self.group, self._dist = group, dist
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"

    def sum(self, values: Any) -> Floats:
        """Element-wise sum over the ranks."""
        return self._reduced(values, self._dist.ReduceOp.SUM)

    def maximum(self, values: Any) -> Floats:
        """Element-wise maximum over the ranks."""
        return self._reduced(values, self._dist.ReduceOp.MAX)

    def join(self, rows: Floats) -> Floats:
        """Gather all ranks' rows [n of the rank, ...], in rank order."""
        counts = [len(part) for part in self._objects(np.empty(len(rows), dtype=np.int8))]
        every = np.zeros((sum(counts), *rows.shape[1:]))
        start = sum(counts[: self.rank])
        every[start : start + len(rows)] = rows
        return self.sum(every)  # zeros elsewhere: a gather of uneven shards

    def together(self, check: Callable[[], T]) -> T:
        """Result of a check of this rank's arguments. ValueError, on all ranks, where that of one rank fails."""
        failure: Exception | None = None
        try:
            found = check()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure = error
        for rank, text in enumerate(self._objects(None if failure is None else str(failure))):
            if text is not None:
                raise ValueError(f"rank {rank}: {text}") from failure
        return found

    def union(self, labels: Any, features: int) -> Any:
        """Sorted union of all ranks' labels. ValueError, on all ranks, for other features or kinds of labels."""
        shards = self._objects((labels, features))
        kinds = ["strings" if some.dtype.kind in "OSU" else "numbers" for some, _ in shards]
        for what, values in (("number of features", [count for _, count in shards]), ("kind of labels", kinds)):
            if len(set(values)) > 1:
                said = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(f"the {what} differs between ranks: {said}; give all ranks rows of the same data")
        return np.unique(np.concatenate([some for some, _ in shards]))

    def explore(self, polish: Polish, penalty: Penalty) -> Floats:
        """Consensus ADMM over the working columns; `oases_svm.solver.Explore`."""
        design = polish.design
        assert isinstance(design, SharedDesign)
        columns = polish.columns
        scale = np.maximum(design.scale[columns], least_scale(penalty))
        change = scale / design.scale[columns]
        own = slice(design.start, design.start + design.owned)
        # The intercept is an additional column without penalty.
        h = np.column_stack([polish.block[own] / change, design.labels[own]])
        return self._agreed(h, design, own, (penalty, scale), polish)[:-1] / change

    def _agreed(
        self, h: Floats, design: Design, own: slice, proximal: tuple[Penalty, Floats], polish: Polish
    ) -> Floats:
        penalty, scale = proximal
        c, matrix = design.weights[own], DenseMatrix(h)
        equations = NormalEquations(matrix, c, RHO1 / RHO2)
        z: Floats = np.zeros(h.shape[1])
        u: Floats = np.zeros(h.shape[1])
        v: Floats = np.zeros(len(c))
        xi: Floats = np.ones(len(c))
        s: Floats = np.zeros(len(c))
        for step in range(1, _STEPS + 1):
            # Over all ranks' rows: local residuals would stop ranks at different steps.
            if not polish.budget.spend(2.0 * design.rows * h.shape[1]):
                break
            target = s + 1 - xi - v
            w = equations.solve(RHO1 / RHO2 * (z - u) + matrix.correlate(c * target))
            mean = self.sum(w + u) / self.size
            before, z = z, mean.copy()
            z[:-1] = scale * penalty.prox(mean[:-1] / scale, self.size * RHO1 * scale**2)
            if not design.intercept:
                z[-1] = 0.0
            product = matrix.times(w)
            xi = np.maximum(0.0, 1 + s - v - product - 1 / RHO2)
            s = np.maximum(0.0, product + xi - 1 + v)
            u, v = u + w - z, v + product + xi - 1 - s
            if step % _CHECKED == 0:
                apart = self.sum(np.array([((w - z) ** 2).sum() + c @ (product + xi - 1 - s) ** 2]))[0]
                moved = self.size * ((z - before) ** 2).sum()
                if np.sqrt(max(apart, moved)) <= _ROUGH * (1 + np.sqrt((z**2).sum())):
                    break
        return z

    def _reduced(self, values: Any, operation: Any) -> Floats:
        import torch

        tensor = torch.from_numpy(np.array(values, dtype=np.float64)).to(self._device)
        self._dist.all_reduce(tensor, op=operation, group=self.group)
        return np.asarray(tensor.cpu().numpy())

    def _objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        self._dist.all_gather_object(found, value, group=self.group)
        return found


class SharedDesign(Design):
    """Design whose x is a shard of the rows; labels, weights, columns and margins are of all ranks' rows."""

    def __init__(
        self, x: Any, labels: Floats, weights: Floats, intercept: bool, ranks: Ranks, moments: Any = None
    ) -> None:
        self.ranks = ranks
        self.own = Design(x, labels, weights, intercept, moments or _moments(x, weights, intercept, ranks))
        self.owned = len(labels)
        self.start = int(sum(ranks._objects(self.owned)[: ranks.rank]))
        super().__init__(x, ranks.join(labels), ranks.join(weights), intercept, self.own.moments)

    def raw_columns(self, indices: Any) -> Floats:
        """Columns of all ranks' rows."""
        return self.ranks.join(self.own.raw_columns(indices))

    def columns(self, indices: Any) -> Floats:
        """Columns of all ranks' rows."""
        return np.asfortranarray(self.ranks.join(self.own.columns(indices)))

    def correlate(self, multipliers: Floats) -> Floats:
        """Correlations with the multipliers of all ranks' rows."""
        return self.ranks.sum(self.own.correlate(self._part(multipliers)))

    def force(self, multipliers: Floats) -> Floats:
        """Force of the multipliers of all ranks' rows."""
        return self.ranks.sum(self.own.force(self._part(multipliers)))

    def margins(self, w: Floats, b: float) -> Floats:
        """Margins of all ranks' rows."""
        return self.ranks.join(self.own.margins(w, b))

    def _part(self, multipliers: Floats) -> Floats:
        return multipliers[self.start : self.start + self.owned]


def _moments(x: Any, weights: Floats, intercept: bool, ranks: Ranks) -> tuple[Floats, Floats, Any]:
    """Centre, scale and usability of the columns over all ranks' rows."""
    d = x.shape[1]
    mean = ranks.sum(np.asarray(x.T @ weights).ravel()) if intercept else np.zeros(d)
    largest, squares = spread_about(x, weights, mean, ranks.maximum)
    return moments_from(mean, largest, ranks.sum(squares))
