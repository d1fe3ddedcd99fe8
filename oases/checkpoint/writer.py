"""Asynchronous checkpointing: tensors are copied, and a thread on every rank writes the copies."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

import oases.checkpoint.retention as retention
from oases.checkpoint.coordination import SaveError, run_on_all_ranks
from oases.checkpoint.files import write
from oases.checkpoint.lock import lock_folder
from oases.checkpoint.metadata import Metadata
from oases.checkpoint.state import State
from oases.core.execution.failure import lost_a_rank
from oases.core.execution.group import ProcessGroup, group_rank, group_size

PATIENCE_SECONDS = 30.0
"""Time that a failing run waits for a pending checkpoint."""
LOST_SECONDS = 5.0
"""The same where a rank is lost, without which no checkpoint is completed: it may just lack the tidying."""


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
        if process_group is not None and group_size(process_group) > 1:
            ranks = dist.get_process_group_ranks(process_group)
            # A group of a subset of ranks is named after them: if it were destroyed, the next group of that name
            # would read stale addresses from the store. So it is kept.
            self._stays = len(ranks) < dist.get_world_size()
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=self._stays)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, state: State, record: Metadata) -> None:
        """Start writing `state`, which must not change meanwhile. Calls `wait` first."""
        self.wait()
        # A daemon: a rank whose peers have died must be able to exit.
        self._thread = threading.Thread(target=self._write, args=(state, record), name="checkpoint", daemon=True)
        self._thread.start()

    def failed(self) -> bool:
        """Whether a write failed that `wait` has not raised yet; other ranks may learn it later.

        Raises other errors of the thread, such as a lost peer.
        """
        if self._error is not None and not isinstance(self._error, SaveError):
            raise self._error
        return self._error is not None

    def wait(self) -> None:
        """Wait for the pending checkpoint; raise SaveError, once and on all ranks, if the write failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        else:
            self.settle(LOST_SECONDS if error is not None and lost_a_rank(error) else PATIENCE_SECONDS)
        if self._lock is not None and self._thread is None:
            self._lock.release()
        if self._group is not None and self._thread is None and not self._stays:
            dist.destroy_process_group(self._group)
            self._group = None

    def serves(self, folder: Path, group: ProcessGroup | None) -> bool:
        """Whether this writes to a folder with all ranks of a group, and its own group still exists."""
        if self.folder != folder:
            return False
        if self._group is None:
            return group_size(group) == 1
        try:
            mine = dist.get_process_group_ranks(self._group)
        except (KeyError, ValueError, RuntimeError):  # destroyed
            return False
        return group is not None and mine == dist.get_process_group_ranks(group)

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
        if self._thread is None:
            return
        self._thread.join(patience_seconds)
        why = f"it took more than {patience_seconds:g} s"
        if not self._thread.is_alive():
            self._thread = None
            error, self._error = self._error, None
            if error is None:
                return
            why = (str(error).splitlines() or [type(error).__name__])[0]
        if self._first:
            warnings.warn(f"the pending checkpoint in {str(self.folder)!r} is incomplete: {why}", stacklevel=4)

    def _require_lock(self) -> None:
        if self._lock is not None:
            self._lock.require()

    def _tidy(self) -> None:
        if self._first:
            retention.tidy(self.folder)  # what a disk that was read-only meanwhile kept of earlier ones
            retention.prune(self.folder, self.keep)

    def _write(self, state: State, record: Metadata) -> None:
        start = time.perf_counter()
        try:
            path = retention.folder_of(self.folder, record.step)
            run_on_all_ranks(self._require_lock, f"checkpoint {str(path)!r}", self._group)
            write(path, state, record, self._group)
            what = f"after checkpoint {str(path)!r}, its folder"
            run_on_all_ranks(self._tidy, what, self._group)
        except Exception as error:  # the rank's main thread raises it
            self._error = error
        else:
            self.saved += 1
        self.write_seconds += time.perf_counter() - start
