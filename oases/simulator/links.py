"""Link model: time of a collective, from measurements or from start-up time and bandwidth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from statistics import median
from typing import Annotated

from oases.records import Number, OneOf
from oases.simulator.program import Contention

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")


USUAL_RATES = (1e3, inf, "not GB/s or Gbit/s")
Rate = Annotated[float, Number("bytes per second", above=0, usual=USUAL_RATES)]


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured collective. bytes: of the whole tensor. seconds: on the slowest rank."""

    collective: Annotated[str, OneOf(COLLECTIVES)]
    ranks: Annotated[int, Number(least=2)]
    bytes: Annotated[int, Number("bytes", least=1)]
    seconds: Annotated[float, Number("seconds", above=0, usual=(0.0, 3600.0, "not milliseconds"))]


def wire_bytes(collective: str, ranks: int, num_bytes: float) -> float:
    """Bytes that each rank sends in a ring: 2 (n-1)/n of the tensor for an all-reduce, half of that for each half."""
    if collective in ("send", "broadcast"):
        return num_bytes
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks * num_bytes


def hops(collective: str, ranks: int) -> int:
    """Number of sequential messages."""
    if collective in ("send", "broadcast"):
        return 1
    return (2 if collective == "all_reduce" else 1) * (ranks - 1)


@dataclass(frozen=True)
class LinkModel:
    """Link model of one scope: intra-node or inter-node.

    startup_seconds: per message. bytes_per_second: per rank inside a node, per node between nodes, in each
    direction. contention: mutual slowdown of compute and collectives.
    """

    startup_seconds: Annotated[float, Number("seconds", least=0, usual=(0.0, 3600.0, "not milliseconds"))]
    bytes_per_second: Rate
    contention: Contention = field(default_factory=Contention)
    samples: tuple[Sample, ...] = ()

    def seconds(self, collective: str, ranks: int, num_bytes: float, sharing: int = 1) -> float:
        """Seconds of a collective of `ranks` ranks on a tensor of `num_bytes`.

        sharing: number of groups that use the inter-node link at once, each with an equal share of the bandwidth.
        """
        if ranks == 1:
            return 0.0
        measured = self._measured.get((collective, ranks))
        startup = hops(collective, ranks) * self.startup_seconds
        if measured is None:
            return startup + sharing * wire_bytes(collective, ranks, num_bytes) / self.bytes_per_second
        whole = _interpolated(measured, num_bytes, wire_bytes(collective, ranks, 1.0) / self.bytes_per_second)
        return whole + (sharing - 1) * max(0.0, whole - startup)

    @cached_property
    def _measured(self) -> dict[tuple[str, int], list[tuple[float, float]]]:
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for sample in self.samples:
            found.setdefault((sample.collective, sample.ranks), []).append((sample.bytes, sample.seconds))
        return {key: _distinct(points) for key, points in found.items()}

    def fit_error(self) -> float:
        """Median relative error of start-up and bandwidth against the measurements."""
        plain = LinkModel(self.startup_seconds, self.bytes_per_second)
        errors = sorted(abs(plain.seconds(s.collective, s.ranks, s.bytes) / s.seconds - 1) for s in self.samples)
        return errors[len(errors) // 2] if errors else 0.0


def _distinct(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted points with one entry per size: the median of duplicates."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    return [(size, median(times)) for size, times in sorted(by_size.items())]


def _interpolated(points: Sequence[tuple[float, float]], x: float, per_byte: float) -> float:
    """Interpolate linearly; extrapolate the last slope above, and the first value below.

    per_byte: slope above a last measurement that noise has made no longer than the one before.
    """
    if x <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * x / points[0][0]
    end = min(max(1, bisect_left(points, (x, 0.0))), len(points) - 1)
    (x0, y0), (x1, y1) = points[end - 1], points[end]
    if x > x1 and y1 <= y0:
        return y1 + per_byte * (x - x1)
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def fit_link(samples: Sequence[Sample], contention: Contention) -> LinkModel:
    """Fit start-up and bandwidth to the samples by relative error; the samples are kept."""
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array([[hops(s.collective, s.ranks), wire_bytes(s.collective, s.ranks, s.bytes)] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    (startup, per_byte), _ = nnls(rows / seconds[:, None], np.ones(len(samples)))
    if per_byte <= 0:
        raise ValueError(
            "the samples do not grow with their bytes, so no bandwidth can be fitted; measure larger ones"
        )
    return LinkModel(float(startup), float(1 / per_byte), contention, tuple(samples))
