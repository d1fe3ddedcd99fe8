"""Folder of checkpoints, `step-000200` and so on: listing, renaming, and keeping the newest."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from oases.checkpoint.lock import LOCK
from oases.checkpoint.metadata import is_checkpoint
from oases.errors import UsageError

_NAME = re.compile(r"step-(\d{6,})")
_LEFT = re.compile(r"\.(?P<name>step-\d{6,})\.(?P<kind>part|old|pruned)")
_BROKEN = ".broken"


def folder_of(folder: str | Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return Path(folder) / f"step-{step:06d}"


def step_of(path: Path) -> int:
    """Step in the name of a checkpoint's folder. ValueError for another name."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path.name!r} is not the name of a checkpoint's folder, such as step-000200")
    return int(found[1])


def checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints in a folder, newest first; empty for a missing folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def require_folder(folder: str | Path) -> Path:
    """Raise UsageError unless checkpoints may be written into `folder`: missing, empty, or with checkpoints."""
    path = Path(folder).resolve()
    if path.exists() and not path.is_dir():
        raise UsageError(f"checkpoint {str(folder)!r} is a file; give the path of a folder of its own")
    if is_checkpoint(path):
        raise UsageError(
            f"checkpoint {str(folder)!r} is a checkpoint itself; give the folder for the checkpoints of all steps"
        )
    if path.is_dir():
        names = [item.name for item in path.iterdir() if item.name != LOCK]
        if names and not any(_NAME.match(name) or _LEFT.fullmatch(name) for name in names):
            raise UsageError(
                f"checkpoint {str(folder)!r} holds other files and no checkpoint; give a new or empty folder"
            )
    return path


def require_replaceable(path: Path) -> None:
    """Raise UsageError unless `path` may be written: absent, an empty folder, or an earlier checkpoint."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"checkpoint {str(path)!r} is a file; give the path of a folder of its own")
    if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
        raise UsageError(
            f"checkpoint {str(path)!r} holds other files, which would be replaced; give a new or empty folder"
        )


def part_of(path: Path) -> Path:
    """Folder in which a checkpoint is written before it gets its name."""
    return path.with_name(f".{path.name}.part")


def begin(path: Path) -> Path:
    """Make the folder in which a checkpoint is written, empty; returns it."""
    part = part_of(path)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def complete(part: Path, path: Path) -> None:
    """Give a complete checkpoint its name. An earlier one of that name stays until then."""
    old = path.with_name(f".{path.name}.old")
    sync(part)
    if path.exists():  # else an earlier run ended here, and `old` is the only one
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    try:
        part.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tidy(folder: str | Path, keep: int = 0) -> None:
    """Remove incomplete checkpoints of a run that ended while writing or removing one; warn of those that stay.

    A checkpoint that was to be replaced by one of the same step, but is not yet, gets its name back. keep: number of
    newest checkpoints that stay; 0: all.
    """
    for path in checkpoints(folder)[keep:] if keep else []:
        # Rename first: a partially removed folder must not look like a checkpoint.
        path.rename(path.with_name(f".{path.name}.pruned"))
    for path in Path(folder).glob(".step-*"):
        if left := _LEFT.fullmatch(path.name):
            replaced = path.with_name(left["name"])
            try:
                if left["kind"] == "old" and not path.is_symlink() and not replaced.exists():
                    path.rename(replaced)
                else:
                    _remove(path)
            except OSError as error:  # one rank tidies: it must not fail alone
                warnings.warn(f"{str(path)!r} cannot be removed: {error.strerror}", stacklevel=2)


def set_aside(path: Path) -> Path:
    """Rename a corrupt checkpoint so that it is no longer a candidate; returns the new path."""
    target = path.with_name(path.name + _BROKEN)
    if target.is_symlink() or target.exists():
        _remove(target)
    return path.rename(target)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()  # what it refers to is not this run's
    else:
        shutil.rmtree(path)
