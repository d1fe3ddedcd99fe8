"""Load traces: tokens per expert and device at each step; recorded, replayed, generated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike

from oases.errors import UsageError
from oases.moe.placement_data import Integers, checked_counts

KIND = "oases loads"


class Recorder:
    """Writes a trace as JSON lines, one per step and layer, valid also if the run is interrupted.

    path: replaced unless `append`, for a resumed run.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self._file = Path(path).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115  (close closes it)
        if not append or not self._file.tell():
            self._file.write(json.dumps({"kind": KIND, "version": 1}) + "\n")

    def write(self, step: int, layer: int, counts: ArrayLike) -> None:
        """Write one layer's counts [expert, device] of a step."""
        self._file.write(json.dumps({"step": step, "layer": layer, "counts": checked_counts(counts).tolist()}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def replay(path: str | Path) -> Iterator[tuple[int, int, Integers]]:
    """Iterate over (step, layer, counts) of a recorded trace. UsageError, with the line, for another file.

    A truncated last line, of a killed run, ends the trace.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        head = json.loads(lines[0]) if lines else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"trace {str(path)!r} cannot be read: {error}; record one with --record-loads") from error
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise UsageError(f"trace {str(path)!r} is not a trace of loads; record one with --record-loads")
    if head.get("version") != 1:
        raise UsageError(f"trace {str(path)!r} is of version {head.get('version')}; this oases reads version 1")
    shape: tuple[int, ...] | None = None
    for number, line in enumerate(lines[1:], start=2):
        try:
            found = json.loads(line)
            step, layer, counts = int(found["step"]), int(found["layer"]), checked_counts(found["counts"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise UsageError(f"trace {str(path)!r}, line {number}: {error}") from error
        if shape is not None and counts.shape != shape:
            raise UsageError(f"trace {str(path)!r}, line {number}: counts of {counts.shape} after {shape}")
        shape = counts.shape
        yield step, layer, counts


def generate(
    *,
    experts: int,
    devices: int,
    tokens: int,
    steps: int = 1,
    concentration: float = 0.3,
    drift: float = 0.05,
    difference: float = 0.1,
    seed: int = 0,
) -> Iterator[Integers]:
    """Generate counts [expert, device] of one layer over some steps: a Dirichlet gate with a random walk of its
    logits.

    tokens: of each device, times top_k. concentration: of the Dirichlet distribution, small for an unbalanced gate.
    drift: standard deviation of a step of the walk, in logits. difference: of the devices' gates from the common one,
    in logits.
    """
    for name, value in (("experts", experts), ("devices", devices), ("steps", steps)):
        if value < 1:
            raise UsageError(f"generate: {name} must be at least 1, got {value}")
    if tokens < 0 or not concentration > 0 or drift < 0 or difference < 0:
        raise UsageError(
            "generate: tokens, drift and difference must be at least 0 and concentration above 0, got "
            f"{tokens}, {drift}, {difference} and {concentration}"
        )
    random = np.random.default_rng(seed)
    logits = np.log(random.dirichlet(np.full(experts, concentration)) + 1e-9)
    own = difference * random.standard_normal((devices, experts))
    for _ in range(steps):
        gates = np.exp(logits + own)
        gates /= gates.sum(1, keepdims=True)
        yield np.stack([random.multinomial(tokens, gate) for gate in gates]).T.copy()
        logits = logits + drift * random.standard_normal(experts)
