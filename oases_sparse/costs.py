"""Cost model of each mode for one tensor, from link and kernel speeds measured on these ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from oases.core.execution.executor import mark, seconds_between
from oases.kernels.sparse import bitmap_pack
from oases_sparse.gradient import DenseRows
from oases_sparse.sketch import Sketch
from oases_sparse.wire import Reduction, Wire

LONG_ENOUGH = 0.05
"""Minimum seconds of the measured collective, beyond the burst of a traffic shaper."""
LARGEST = 1 << 22
"""Maximum numbers sent for the measurement."""
_SAMPLE = (4096, 1024, 64)
"""Rows, non-zero rows and width of the measured gradient."""


@dataclass(frozen=True)
class Task:
    """One tensor in one step.

    row_bytes: of one stored row of `width` numbers. union: rows that any rank has; largest: maximum of one rank,
    which a gather sends; early: of these, rows sent with the bitmap.
    """

    rows: int
    width: int
    row_bytes: int
    union: int
    largest: int = 0
    early: int = 0


@dataclass(frozen=True)
class Costs:
    """Measured costs of this group of ranks, equal on each.

    latency: seconds of a tiny collective. byte_seconds: per byte that a rank sends. scan_seconds: per number scanned
    for a bitmap; packed_seconds and sketch_seconds: per non-zero of the union, to encode and decode.
    """

    latency: float
    byte_seconds: float
    scan_seconds: float
    packed_seconds: float
    sketch_seconds: float

    def seconds(self, mode: str, task: Task, wire: Wire, sketch_cells: int = 0) -> float:
        """Predicted seconds for one tensor, including the bitmap."""
        if mode == "dense":
            return self.latency + self.byte_seconds * wire.reduced_bytes(task.rows * task.row_bytes)
        if mode == "gather":
            work = self.packed_seconds * wire.world * task.largest * task.width
            sent = (wire.world - 1) * ((task.rows + 7) // 8 + task.largest * task.row_bytes)
            phases = 2 if task.largest > task.early else 1
            scan = self.scan_seconds * task.rows * task.width
            return phases * self.latency + self.byte_seconds * sent + scan + work
        nonzeros = task.union * task.width
        rows = {
            "packed": task.union * task.row_bytes,
            "sketch": sketch_cells * task.width * 4,
        }[mode]
        each = {"packed": self.packed_seconds, "sketch": self.sketch_seconds}[mode]
        sent = wire.united_bytes((task.rows + 7) // 8) + wire.reduced_bytes(rows)
        scan = self.scan_seconds * task.rows * task.width
        return 2 * self.latency + self.byte_seconds * sent + scan + each * nonzeros


def measure(wire: Wire, device: torch.device, sketch_rows: int) -> Costs:
    """Time the link and the kernels; the slowest rank's times count. Collective."""
    nothing = torch.zeros(16, device=device)
    latency = min(_sent(wire, nothing) for _ in range(4))
    numbers, seconds = 1 << 14, 0.0
    while True:
        seconds = _sent(wire, torch.zeros(numbers, device=device))
        if seconds >= LONG_ENOUGH or numbers >= LARGEST:
            break
        numbers *= 4
    byte_seconds = max(0.0, seconds - latency) / max(1, wire.reduced_bytes(4 * numbers))
    return Costs(latency, byte_seconds, *wire.worst(_work(device, sketch_rows), device))


def _sent(wire: Wire, tensor: torch.Tensor) -> float:
    unbooked = Reduction("", "")
    (seconds,) = wire.worst([_timed(lambda: wire.sum(tensor, unbooked).wait(), tensor.device)], tensor.device)
    return seconds


def _work(device: torch.device, sketch_rows: int) -> list[float]:
    """Seconds per number of the bitmap, and per non-zero of packed and sketch."""
    rows, used, width = _SAMPLE
    gradient = torch.zeros(rows, width, device=device)
    gradient[:: rows // used] = 1.0
    held = DenseRows(gradient, in_place=True)
    union, values = held.own()
    sketch = Sketch.sized(used, sketch_rows, 0.5, 0)

    def best(work: Callable[[], object]) -> float:
        return min(_timed(work, device) for _ in range(3))

    nonzeros = used * width
    return [
        best(lambda: bitmap_pack(gradient)) / (rows * width),
        best(lambda: held.put(union, held.gather(union).div_(1))) / nonzeros,
        best(lambda: held.put(union, sketch.decode(sketch.encode(union, values), union))) / nonzeros,
    ]


def _timed(work: Callable[[], object], device: torch.device) -> float:
    start = mark(device)
    work()
    return seconds_between(start, mark(device))
