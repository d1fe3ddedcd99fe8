"""Folder of checkpoints, `step-000200` and so on: listing, renaming, and keeping the newest."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from oases.checkpoint.lock import LOCK
from oases.checkpoint.metadata import is_checkpoint
from oases.errors import UsageError

_NAME = re.compile(r"step-(\d{6,})")
WANDB_RUN = ".wandb-run"
"""File with the id of the run at Weights & Biases, which a resumed run continues."""
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
        names = [item.name for item in path.iterdir() if item.name not in (LOCK, WANDB_RUN)]
        if names and not any(_NAME.match(name) or _LEFT.fullmatch(name) for name in names):
            raise UsageError(
                f"checkpoint {str(folder)!r} holds other files and no checkpoint; give a new or empty folder"
            )
    return path


def tidy(folder: str | Path) -> None:
    """Remove incomplete checkpoints of a run that ended while writing or removing one; warn of those that stay.

    A checkpoint that was to be replaced by one of the same step, but is not yet, gets its name back.
    """
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


def prune(folder: str | Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0: remove none."""
    for path in checkpoints(folder)[keep:] if keep else []:
        # Rename first: a partially removed folder must not look like a checkpoint.
        _remove(path.rename(path.with_name(f".{path.name}.pruned")))


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()  # what it refers to is not this run's
    else:
        shutil.rmtree(path)
