"""A line of JSON for every step, in a file that a run which starts again goes on with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from oases.errors import UsageError


def steps_in(path: str | Path) -> int:
    """The last step that a log tells of; 0 for none or no file. UsageError for a file that is no log."""
    path = Path(path)
    return _last(path, None)[0] if path.is_file() else 0


class StepLog:
    """Appends to a log at `path`. Lines of steps beyond `steps_done` are cut off: they are about to be done again.

    UsageError for a file that is no log.
    """

    def __init__(self, path: str | Path, steps_done: int) -> None:
        path = Path(path)
        if path.is_file():
            _, end = _last(path, steps_done)
            with path.open("rb+") as old:
                old.truncate(end)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one step's values, among them `step`; a number that is not finite becomes null."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()  # what the system has, the end of this process does not lose

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _last(path: Path, steps: int | None) -> tuple[int, int]:
    """(the last step up to `steps`, where its line ends). A last line that is not whole does not count."""
    last, end = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"step log {str(path)!r}: line {number} is no step of a run; give a new "
                    "file, or one that --step-log wrote"
                ) from error
            if steps is not None and step > steps:
                break
            last, end = step, end + len(line)
    return last, end
