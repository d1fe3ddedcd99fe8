"""Lock of a folder of checkpoints: one run at a time resumes from it, writes to it and removes from it.

The lock is a file that rank 0 holds by the file system's own locks, which end with the process. Where the file system
has none, the file is a lease: renewed while the run lives, and free once it has not been renewed for a minute or its
process is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
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
_LEASE_SECONDS = 60.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

_held: dict[str, _Hold] = {}
"""Folders that this process holds, by path: the file system does not tell apart two runs in one process."""


class FolderLock:
    """A run's hold of a folder, until `release`, the end of this object or of the process.

    Runs of one process, which come one after another, may hold a folder together. Raises UsageError, naming the other
    run, for a folder that a run of another process holds for patience_seconds, OSError where no file can be made
    in it.
    """

    def __init__(self, folder: str | Path, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        path = str(Path(folder).resolve())
        if path not in _held:
            _held[path] = _Hold(Path(path) / LOCK, patience_seconds)
        self._hold = _held[path]
        self._hold.runs += 1
        self.release: Callable[[], object] = finalize(self, _release, path)
        """Give the folder up, once."""

    def require(self) -> None:
        """Raise OSError where the folder was lost: the lock's file removed, or the lease taken."""
        self._hold.require()


class _Hold:
    """File that this process has locked. runs: number of users."""

    def __init__(self, file: Path, patience_seconds: float) -> None:
        self._file = file
        self._mine = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": time.time()})
        self._ended = threading.Event()
        self._descriptor = -1
        self.runs = 0
        file.parent.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + patience_seconds
        while not self._take():
            if time.monotonic() > end:
                raise UsageError(
                    f"checkpoint {str(file.parent)!r} belongs to another run, {_holder(file)}; wait for its end, "
                    "stop it, or give another folder"
                )
            time.sleep(0.1)

    def _take(self) -> bool:
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return self._lease()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        self._descriptor = descriptor
        if self._intact():  # not removed between opening and locking
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, self._mine.encode(), 0)
            return True
        self._close()
        return False

    def _lease(self) -> bool:
        text = _text(self._file)
        if text and not _lapsed(self._file, text):
            return False
        aside = self._file.with_name(f"{LOCK}.{os.getpid()}")
        aside.write_text(self._mine)
        aside.replace(self._file)
        time.sleep(0.2)  # of several that found it free, the last one keeps it
        if _text(self._file) != self._mine:
            return False
        threading.Thread(target=self._renew, name="oases-lease", daemon=True).start()
        return True

    def _renew(self) -> None:
        while not self._ended.wait(_LEASE_SECONDS / 6):
            with suppress(OSError):  # `require` reports it
                if _text(self._file) == self._mine:
                    os.utime(self._file)

    def _intact(self) -> bool:
        if self._descriptor < 0:
            return _text(self._file) == self._mine
        try:
            # Again: a lock ends where its process closes any descriptor of the file, as a copy of the folder does.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._file, follow_symlinks=False))
        except (FileNotFoundError, BlockingIOError, PermissionError):
            return False

    def require(self) -> None:
        if not self._intact():
            raise OSError(f"{str(self._file)!r} is no longer this run's: {_holder(self._file)}")

    def end(self) -> None:
        self._ended.set()
        with suppress(OSError):  # a folder that has become unwritable; the next run takes it over
            if self._intact():
                self._file.unlink()
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock_folder(folder: str | Path, group: ProcessGroup | None) -> FolderLock | None:
    """Hold a folder on rank 0 for all ranks; None on the others. Collective; UsageError on all ranks alike."""
    lock, fault = None, ""
    if group_rank(group) == 0:
        try:
            lock = _locked(folder)
        except UsageError as error:
            fault = str(error)
    fault = all_gather_objects(fault, group)[0]
    if fault:
        raise UsageError(fault)
    return lock


def require_free(folder: str | Path) -> None:
    """Raise UsageError where another run holds a folder, or it cannot be written."""
    _locked(folder).release()


def lock_now(folder: str | Path) -> FolderLock:
    """Hold a folder that no other run holds now. UsageError where one does, or it cannot be written."""
    return _locked(folder, patience_seconds=0)


def _locked(folder: str | Path, **options: float) -> FolderLock:
    try:
        return FolderLock(folder, **options)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"checkpoint {str(folder)!r} cannot be written: {reason}; give another folder") from error


def _release(path: str) -> None:
    hold = _held[path]
    hold.runs -= 1
    if not hold.runs:
        del _held[path]
        hold.end()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _lapsed(file: Path, text: str) -> bool:
    """Whether a lease is over: not renewed, or held by a process of this machine that is gone."""
    try:
        if time.time() - file.stat().st_mtime > _LEASE_SECONDS:
            return True
        holder = json.loads(text)
        if holder["host"] == socket.gethostname():
            os.kill(holder["process"], 0)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (ValueError, TypeError, KeyError, OSError, OverflowError):
        return False  # another's process, or a file that is being written
    return False


def _holder(file: Path) -> str:
    try:
        found = json.loads(_text(file))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(found["since"])))
        return f"process {found['process']} on {found['host']}, started {since}"
    except (ValueError, TypeError, KeyError, OverflowError, OSError):
        return f"which {str(file)!r} does not name"
