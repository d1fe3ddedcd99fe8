"""Each step's values as curves in TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from oases.errors import UsageError

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


def require_tensorboard(folder: str, *, new: bool) -> None:
    """Raise UsageError unless curves may be written into `folder`. new: by a run that does not go on from another."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"tensorboard {folder!r} needs the package tensorboard, which is not installed; pip install "
            "tensorboard, "
            "or take --step-log FILE"
        )
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UsageError(f"tensorboard {folder!r} is a file; give the path of a folder")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"tensorboard {folder!r}: its folder does not exist")
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
