"""Logs of a run, which one that goes on continues: a line of JSON for every step, and TensorBoard's curves."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from oases.errors import UsageError, make_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
"""Names of values in TensorBoard; one that is not here is train/NAME."""
_FLUSH_SECONDS = 10


def last_logged_step(path: str | Path) -> int:
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


def require_tensorboard(folder: str, *, new: bool) -> None:
    """Raise UsageError unless curves may be written into `folder`. new: by a run that does not go on from another."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"tensorboard {folder!r} needs the package tensorboard, which is not installed; pip install tensorboard, "
            "or use --step-log FILE"
        )
    path = make_folder(folder, "tensorboard")
    if new and any(path.glob("events.out.tfevents.*")):
        raise UsageError(f"tensorboard {folder!r} holds the curves of another run; give a new folder")


class Scalars:
    """Writes curves into `folder`. What a run that ended wrote of steps beyond `steps_done` no longer counts.

    A file of events cannot be cut; instead this one says at which step it begins, and readers drop what others have
    from there on. For one process of a run.
    """

    def __init__(self, folder: str | Path, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always installed

        self._writer: SummaryWriter = SummaryWriter(  # type: ignore[no-untyped-call]
            str(folder), purge_step=steps_done + 1, flush_secs=_FLUSH_SECONDS
        )

    def write(self, *, step: int, **values: Any) -> None:
        """Add one step's values; None and what is no number are left out."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                tag = TAGS.get(name, f"train/{name}")
                self._writer.add_scalar(tag, float(value), step)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Hand all to the system: a run that goes on from a checkpoint must find the curves up to there."""
        self._writer.flush()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]
