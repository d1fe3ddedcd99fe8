"""Writing of checkpoints: tensors are copied, and written in the background by `torch.distributed.checkpoint`."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

import oases.checkpoint.retention as retention
from oases.checkpoint.lock import lock_folder
from oases.checkpoint.metadata import Metadata
from oases.checkpoint.state import State
from oases.core.execution.failure import check
from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.distributed.failures import lost_a_rank
from oases.errors import UsageError

PATIENCE_SECONDS = 30.0
"""Time that a failing run waits for a pending checkpoint."""
LOST_SECONDS = 5.0
"""The same where a rank is lost, without which no checkpoint is completed: it may just lack the tidying."""


class SaveError(UsageError):
    """Failure to write a checkpoint, raised on every rank; earlier checkpoints are unchanged."""


def write(path: str | Path, state: State, record: Metadata, group: ProcessGroup | None) -> None:
    """Write what `state` returned with its metadata to the folder `path`, replacing an earlier checkpoint.

    Collective over group: all ranks; replicated tensors are written once. SaveError on all ranks where the folder
    holds anything else or cannot be written.
    """
    from oases.checkpoint import storage  # slow to import

    path = Path(path).resolve()
    with _save_errors(path, group):
        storage.save_now(state, storage.Writer(path, record), group)


class CheckpointWriter:
    """Asynchronous writer of checkpoints into `folder`, one at a time. All methods are collectives.

    keep: number of newest checkpoints to keep, 0: all. process_group: all ranks. The threads use a gloo group of
    their own: in the run's groups their collectives would interleave with those of the step. The folder is locked
    until the end of the context; UsageError where another run holds it.
    """

    def __init__(self, folder: str | Path, keep: int, process_group: ProcessGroup | None) -> None:
        self.folder = Path(folder).resolve()
        self._lock = lock_folder(self.folder, process_group)
        self.keep = keep
        self.saved = 0
        """Checkpoints written."""
        self.write_seconds = 0.0
        """Time of the writing threads."""
        self._first = group_rank(process_group) == 0
        self._group: ProcessGroup | None = None
        if process_group is not None:
            ranks = dist.get_process_group_ranks(process_group)
            # A group of a subset of ranks is named after them: if it were destroyed, the next group of that name
            # would read stale addresses from the store. So it is kept.
            self._stays = len(ranks) < dist.get_world_size()
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=self._stays)
        self._pending: futures.Future[Any] | None = None
        self._storage: Any = None
        """Writer of the pending checkpoint."""

    def start(self, state: State, record: Metadata, *, copied: bool = True) -> None:
        """Start writing `state`. Calls `wait` first. copied: else it must not change meanwhile."""
        from oases.checkpoint import storage  # slow to import

        self.wait()
        path = retention.folder_of(self.folder, record.step)
        self._storage = storage.Writer(path, record, copied=copied, before=self._require_lock, after=self._tidy)
        self._pending = storage.save(state, self._storage, self._group)

    def failed(self) -> bool:
        """Whether a write failed that `wait` has not raised yet; other ranks may learn it later.

        Raises other errors of the thread, such as a lost peer.
        """
        if self._pending is None or not self._pending.done() or (error := self._pending.exception()) is None:
            return False
        if isinstance(error, Exception):
            raise error
        return True

    def wait(self) -> None:
        """Wait for the pending checkpoint; raise SaveError, once and on all ranks, if the write failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with _save_errors(self._storage.final, self._group):
                pending.result()
            self.saved += 1
            self.write_seconds += self._storage.seconds

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        else:
            self.settle(LOST_SECONDS if error is not None and lost_a_rank(error) else PATIENCE_SECONDS)
        if self._lock is not None and self._pending is None:
            self._lock.release()
        if self._group is not None and self._pending is None and not self._stays:
            dist.destroy_process_group(self._group)
            self._group = None

    def serves(self, folder: Path, group: ProcessGroup | None) -> bool:
        """Whether this writes to a folder with all ranks of a group, and its own group still exists."""
        if self.folder != folder or self._group is None or group is None:
            return self.folder == folder and self._group is group
        try:
            return dist.get_process_group_ranks(self._group) == dist.get_process_group_ranks(group)
        except (KeyError, ValueError, RuntimeError):  # destroyed
            return False

    def close(self) -> None:
        """Wait for the pending checkpoint, unless the group is destroyed, and give up the folder. Collective."""
        if self.serves(self.folder, self._group):
            self.__exit__(None, None, None)
        else:
            self.settle()
            if self._lock is not None:
                self._lock.release()

    def settle(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for the pending checkpoint while another error propagates or at exit; a failure only warns."""
        if self._pending is None:
            return
        why = f"it took more than {patience_seconds:g} s"
        if futures.wait([self._pending], patience_seconds).done:
            error, self._pending = self._pending.exception(), None
            if error is None:
                self.saved += 1
                return
            why = (_causes(error).splitlines() or [type(error).__name__])[0]
        if self._first:
            warnings.warn(f"the pending checkpoint in {str(self.folder)!r} is incomplete: {why}", stacklevel=4)

    def _require_lock(self) -> None:
        if self._lock is not None:
            self._lock.require()

    def _tidy(self) -> None:
        retention.tidy(self.folder, self.keep)  # also what a disk that was read-only meanwhile kept of earlier ones


@contextmanager
def _save_errors(path: Path, group: ProcessGroup | None) -> Iterator[None]:
    """Raise SaveError, on all ranks alike, where a checkpoint could not be written, and remove what was.

    FailedRankError after a failure of the run.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    check(group)
    try:
        yield
    except CheckpointException as error:
        if group_rank(group) == 0:
            shutil.rmtree(retention.part_of(path), ignore_errors=True)
        if group_size(group) > 1:
            dist.barrier(group=group)  # no rank looks while it is being removed
        raise SaveError(f"checkpoint {str(path)!r} could not be written: {_causes(error)}") from error


def _causes(error: BaseException) -> str:
    """Failures of a CheckpointException, by rank; the text of another error."""
    said = []
    for rank, (cause, _) in getattr(error, "failures", {}).items():
        text = str(cause) if isinstance(cause, OSError | UsageError) else f"{type(cause).__name__}: {cause}"
        said.append(
            f"rank {rank}: {text}{'; free disk space, or save elsewhere' if isinstance(cause, OSError) else ''}"
        )
    return "; ".join(said) or str(error)
