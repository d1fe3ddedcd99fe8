"""Logs of a run: JSON Lines with one line per step, and TensorBoard. A resumed run appends."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oases.errors import UsageError, make_folder
from oases.files import parse_json, read_lines, unwritable

TAGS = {
    "seconds": "speed/step_seconds",
    "tokens_per_second": "speed/tokens_per_second",
    "flops_per_second": "speed/model_flops_per_second",
    "utilisation": "speed/utilisation",
    "exposed": "overlap/exposed_share",
    "bubble": "overlap/bubble_share",
    "memory_bytes": "memory/peak_bytes",
    "stall_seconds": "checkpoint/stall_seconds",
    "balance_before": "experts/balance_degree_without_copies",
    "balance_after": "experts/balance_degree",
    "copies": "experts/copies",
    "dropped": "experts/dropped_slots",
    "saved_seconds": "experts/modelled_seconds_saved",
}
"""Tags of values in TensorBoard; others are train/NAME."""
_FLUSH_SECONDS = 10
_REMEDY = "give a new file, or one that --step-log wrote"


def last_logged_step(path: str | Path) -> int:
    """Last step in a log; 0 for an empty or missing file. UsageError for a file that is not a step log."""
    return _last(Path(path), math.inf)[0]


class StepLog:
    """Step log at `path`, opened for appending. Lines of steps beyond `steps_done`, to be repeated, are removed.

    UsageError for a file that is not a step log.
    """

    def __init__(self, path: str | Path, steps_done: int) -> None:
        self._path = path = Path(path)
        _, end = _last(path, steps_done)
        if path.is_file():
            os.truncate(path, end)
        try:
            self._file = path.open("a", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            raise UsageError(f"step log {str(path)!r} cannot be written: {error}; give another path") from error

    def write(self, **values: Any) -> None:
        """Append the values of a step, `step` among them; non-finite numbers become null."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        try:
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")
            self._file.flush()  # survives the death of this process
        except OSError as error:
            raise unwritable("step log", self._path, error) from error

    def sync(self) -> None:
        """Flush to disk, so that a run resumed from a checkpoint finds all steps before it."""
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # no terminal or other device
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise unwritable("step log", self._path, error) from error

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()  # writes again what is left in its buffer
        except OSError as failed:
            if kind is None:
                raise unwritable("step log", self._path, failed) from failed


def _last(path: Path, steps: float) -> tuple[int, int]:
    """Last step up to `steps`, and the offset where its line ends; zeros without a file.

    An incomplete last line is ignored. UsageError for a file that is not a step log.
    """
    last, end = 0, 0
    if path.exists() and not path.is_file() and not path.is_char_device():
        raise UsageError(f"step log {str(path)!r} is neither a file nor a terminal; give the path of a file")
    for number, line in read_lines(path, "step log", _REMEDY) if path.is_file() else ():
        if not line.endswith(b"\n"):
            break
        where = f"step log {str(path)!r}, line {number}"
        found = parse_json(line, where, _REMEDY)
        step = found.get("step") if isinstance(found, dict) else None
        if type(step) is not int or not 0 <= step < 2**63:
            raise UsageError(f"{where} is not a step of a run; {_REMEDY}")
        if step > steps:
            break
        last, end = step, end + len(line)
    return last, end


def require_tensorboard(folder: str, *, new: bool) -> None:
    """Raise UsageError unless TensorBoard logs may be written to `folder`. new: the run does not resume another."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"tensorboard {folder!r} needs the package tensorboard, which is not installed; pip install tensorboard, "
            "or use --step-log FILE"
        )
    path = make_folder(folder, "tensorboard")
    if new and any(path.glob("events.out.tfevents.*")):
        raise UsageError(f"tensorboard {folder!r} holds the curves of another run; give a new folder")


def scalars_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Numeric values of a step by tag, and its overlap by stack, layer, collective and pass; others are left out."""
    overlap = {
        f"overlap/{where}/{name}": value
        for where, seconds in (values.get("overlap") or {}).items()
        for name, value in seconds.items()
    }
    return overlap | {
        TAGS.get(name, f"train/{name}"): float(value)
        for name, value in values.items()
        if isinstance(value, (int, float))
    }


class Scalars:
    """TensorBoard writer into `folder`, for one process of a run.

    Event files cannot be truncated; `purge_step` instead makes readers drop what an earlier process wrote of steps
    beyond `steps_done`.
    """

    def __init__(self, folder: str | Path, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always installed

        make: Any = SummaryWriter
        self._writer = make(str(folder), purge_step=steps_done + 1, flush_secs=_FLUSH_SECONDS)

    def write(self, *, step: int, **values: Any) -> None:
        """Add `scalars_of` a step."""
        for tag, value in scalars_of(values).items():
            self._writer.add_scalar(tag, value, step)

    def sync(self) -> None:
        """Write out buffered events, so that a run resumed from a checkpoint finds all steps before it."""
        self._writer.flush()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
