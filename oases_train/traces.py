"""Load traces: tokens per expert and device at each step; recorded and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike

from oases.errors import UsageError
from oases.files import parse_json, read_lines, unwritable
from oases.limits import short
from oases.moe.placement import Integers, checked_counts

KIND = "oases loads"
_REMEDY = "record one with --record-loads"


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def replay(path: str | Path) -> Iterator[tuple[int, int, Integers]]:
    """Iterate over (step, layer, counts) of a recorded trace. UsageError, with the line, for another file.

    A truncated last line, of a killed run, ends the trace.
    """
    where, number, shape = f"trace {str(path)!r}", 0, None
    for number, line in read_lines(path, "trace", _REMEDY):
        at = f"{where}, line {number}"
        if number == 1:
            _require_head(line, at)
            continue
        try:
            found = parse_json(line, at, _REMEDY)
            step, layer = (_count(found, name) for name in ("step", "layer"))
            counts = checked_counts(found.get("counts"))
        except (ValueError, TypeError, OverflowError) as error:  # of numpy, for lists of lists of something else
            if not line.endswith(b"\n"):
                return
            raise UsageError(str(error) if str(error).startswith(at) else f"{at}: {error}") from error
        if shape is not None and counts.shape != shape:
            raise UsageError(f"{at}: counts of {counts.shape} after {shape}")
        shape = counts.shape
        yield step, layer, counts
    if not number:
        raise UsageError(f"{where} is empty, so it is not a trace of loads; {_REMEDY}")


def _require_head(line: bytes, at: str) -> None:
    head = parse_json(line, at, _REMEDY)
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise UsageError(f"{at} is not a trace of loads; {_REMEDY}")
    if head.get("version") != 1:
        raise UsageError(f"{at} is of version {short(head.get('version'))}; this oases reads version 1")


def _count(found: Any, name: str) -> int:
    value = found.get(name) if isinstance(found, dict) else found
    if type(value) is not int or not 0 <= value < 2**63:
        raise UsageError(f"{name} must be a whole number of at least 0, got {short(value)}")
    return value
