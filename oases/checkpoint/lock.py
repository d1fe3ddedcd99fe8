"""Lock of a folder of checkpoints: one run at a time resumes from it, writes to it and removes from it.

Rank 0 holds a file in it by a lock of the file system, which ends with the process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import finalize

from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank
from oases.errors import UsageError

LOCK = ".lock"
"""Name of the file: host, process and start of the run that holds the folder, as JSON."""

_PATIENCE_SECONDS = 5.0
"""Time that a run waits for another, which may just be dying."""

_held: dict[Path, list[int]] = {}
"""Descriptor and number of users of each file that this process holds; its locks do not tell its runs apart."""


class FolderLock:
    """A run's hold of a folder, until `release`, the end of this object or of the process.

    Runs of one process, which come one after another, may hold a folder together. Raises UsageError, naming the other
    run, for a folder that a run of another process holds for patience_seconds, and where no file can be made or
    locked in it.
    """

    def __init__(self, folder: str | Path, patience_seconds: float | None = None) -> None:
        self._file = Path(folder).resolve() / LOCK
        end = time.monotonic() + (_PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            while self._file not in _held and not _take(self._file):
                if time.monotonic() > end:
                    raise UsageError(
                        f"checkpoint {str(folder)!r} belongs to another run, {_holder(self._file)}; wait for its "
                        "end, stop it, or give another folder"
                    )
                time.sleep(0.1)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"checkpoint {str(folder)!r} cannot be written: {reason}; give another folder"
            ) from error
        _held[self._file][1] += 1
        self.release: Callable[[], object] = finalize(self, _release, self._file)
        """Give the folder up, once."""

    def require(self) -> None:
        """Raise OSError where the folder was lost: the lock's file removed, or locked by another."""
        if not _intact(self._file):
            raise OSError(f"{str(self._file)!r} is no longer this run's: {_holder(self._file)}")


def lock_folder(folder: str | Path, group: ProcessGroup | None) -> FolderLock | None:
    """Hold a folder on rank 0 for all ranks; None on the others. Collective; UsageError on all ranks alike."""
    lock, fault = None, ""
    if group_rank(group) == 0:
        try:
            lock = FolderLock(folder)
        except UsageError as error:
            fault = str(error)
    fault = all_gather_objects(fault, group)[0]
    if fault:
        raise UsageError(fault)
    return lock


def _take(file: Path) -> bool:
    """Lock a file and write this process into it; False where another has it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    _held[file] = [descriptor, 0]
    if _intact(file):
        os.truncate(descriptor, 0)
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        return True
    os.close(_held.pop(file)[0])  # removed between opening and locking
    return False


def _intact(file: Path) -> bool:
    try:
        # Again: a lock ends where its process closes any descriptor of the file, as a copy of the folder does.
        fcntl.lockf(_held[file][0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(_held[file][0]), os.stat(file, follow_symlinks=False))
    except (FileNotFoundError, BlockingIOError, PermissionError):
        return False


def _release(file: Path) -> None:
    _held[file][1] -= 1
    if not _held[file][1]:
        with suppress(OSError):  # a folder that has become unwritable; the next run takes it over
            if _intact(file):
                file.unlink()
        os.close(_held.pop(file)[0])


def _holder(file: Path) -> str:
    try:
        found = json.loads(file.read_text())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(found["since"])))
        return f"process {found['process']} on {found['host']}, started {since}"
    except (ValueError, TypeError, KeyError, OverflowError, OSError):
        return f"which {str(file)!r} does not name"
