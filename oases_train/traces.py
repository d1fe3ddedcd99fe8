"""Load traces: tokens per expert and device at each step; recorded and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from numpy.typing import ArrayLike

import oases.records as records
from oases.errors import UsageError
from oases.files import parse_json, read_lines, unwritable
from oases.moe.placement import Integers, checked_counts

KIND = "oases loads"
_REMEDY = "record one with --record-loads"


@dataclass(frozen=True)
class _Row:
    """Line of a trace: counts [expert, device] of a layer in a step."""

    step: Annotated[int, records.Number(least=0)]
    layer: Annotated[int, records.Number(least=0)]
    counts: Any


class Recorder:
    """Writes a trace as JSON lines, one per step and layer, valid also if the run is interrupted.

    path: replaced unless `append`, for a resumed run.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self._path = path
        self._file = Path(path).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115  (close closes it)
        if not append or not self._file.tell():
            self._put({"kind": KIND, "version": 1})

    def write(self, step: int, layer: int, counts: ArrayLike) -> None:
        """Write one layer's counts [expert, device] of a step."""
        self._put({"step": step, "layer": layer, "counts": checked_counts(counts).tolist()})

    def _put(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise unwritable("trace", self._path, error) from error

    def close(self) -> None:
        """Close the file. UsageError where the rest could not be written."""
        try:
            self._file.close()
        except OSError as error:
            raise unwritable("trace", self._path, error) from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def replay(path: str | Path) -> Iterator[tuple[int, int, Integers]]:
    """Iterate over (step, layer, counts) of a recorded trace. UsageError, with the line, for another file.

    A truncated last line, of a killed run, ends the trace.
    """
    where, number, shape = f"trace {str(path)!r}", 0, None
    for number, line in read_lines(path, "trace", _REMEDY):
        at = f"{where}, line {number}"
        if number == 1:
            head = parse_json(line, at, _REMEDY)
            if isinstance(head, dict):
                head["format"] = head.pop("kind", None)
            records.body(head, KIND, 1, at, _REMEDY, "a trace of loads")
            continue
        try:
            found = records.read(_Row, parse_json(line, at, _REMEDY), at, _REMEDY)
            counts = checked_counts(found.counts)
        except (ValueError, TypeError, OverflowError) as error:  # of numpy, for lists of lists of something else
            if not line.endswith(b"\n"):
                return
            raise UsageError(str(error) if str(error).startswith(at) else f"{at}: {error}") from error
        if shape is not None and counts.shape != shape:
            raise UsageError(f"{at}: counts of {counts.shape} after {shape}")
        shape = counts.shape
        yield found.step, found.layer, counts
    if not number:
        raise UsageError(f"{where} is empty, so it is not a trace of loads; {_REMEDY}")
