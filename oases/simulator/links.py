"""What a link takes to carry a collective: measured where it was measured, by start-up and bandwidth elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from oases.simulator.program import Contention

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured collective: bytes are those of the whole tensor, seconds of the slowest rank."""

    collective: str
    ranks: int
    bytes: int
    seconds: float


def wire_bytes(collective: str, ranks: int, num_bytes: float) -> float:
    """Bytes that each rank sends, by a ring: 2 (n-1)/n of the tensor for an all-reduce, half of it for its halves."""
    if collective in ("send", "broadcast"):
        return num_bytes
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks * num_bytes


def hops(collective: str, ranks: int) -> int:
    """Messages that follow one another."""
    if collective in ("send", "broadcast"):
        return 1
    return (2 if collective == "all_reduce" else 1) * (ranks - 1)


@dataclass(frozen=True)
class LinkModel:
    """Links of one scope: inside a node, or between nodes.

    startup_seconds: of one message. bytes_per_second: of a rank inside a node, of a whole node between nodes, each
    way. contention: how compute and a collective in flight slow each other down.
    """

    startup_seconds: float
    bytes_per_second: float
    contention: Contention = field(default_factory=Contention)
    samples: tuple[Sample, ...] = ()

    def seconds(self, collective: str, ranks: int, num_bytes: float, sharing: int = 1) -> float:
        """Seconds of a collective of `ranks` ranks on a tensor of `num_bytes`.

        sharing: groups that use the link between the nodes at once; each gets its part of the bandwidth.
        """
        if ranks == 1:
            return 0.0
        measured = self._measured.get((collective, ranks))
        startup = hops(collective, ranks) * self.startup_seconds
        if measured is None:
            return startup + sharing * wire_bytes(collective, ranks, num_bytes) / self.bytes_per_second
        whole = _interpolated(measured, num_bytes)
        return whole + (sharing - 1) * max(0.0, whole - startup)

    @cached_property
    def _measured(self) -> dict[tuple[str, int], list[tuple[float, float]]]:
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for sample in self.samples:
            found.setdefault((sample.collective, sample.ranks), []).append((sample.bytes, sample.seconds))
        return {key: _distinct(points) for key, points in found.items()}

    def fit_error(self) -> float:
        """Median relative error of start-up and bandwidth alone against what was measured."""
        plain = LinkModel(self.startup_seconds, self.bytes_per_second)
        errors = sorted(abs(plain.seconds(s.collective, s.ranks, s.bytes) / s.seconds - 1) for s in self.samples)
        return errors[len(errors) // 2] if errors else 0.0


def _distinct(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """In order, each size once: of several times the median."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    return [(size, median(times)) for size, times in sorted(by_size.items())]


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between the points; beyond them the last slope goes on, below them the time of the first one is kept."""
    if x <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * x / points[0][0]
    end = min(max(1, bisect_left(points, (x, 0.0))), len(points) - 1)
    (x0, y0), (x1, y1) = points[end - 1], points[end]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def fit_link(samples: Sequence[Sample], contention: Contention) -> LinkModel:
    """Start-up and bandwidth that come closest to the samples, relatively, with the samples themselves kept."""
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array([[hops(s.collective, s.ranks), wire_bytes(s.collective, s.ranks, s.bytes)] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    (startup, per_byte), _ = nnls(rows / seconds[:, None], np.ones(len(samples)))
    if per_byte <= 0:
        raise ValueError(
            "the samples do not grow with their bytes, so no bandwidth can be found; measure larger ones"
        )
    return LinkModel(float(startup), float(1 / per_byte), contention, tuple(samples))
