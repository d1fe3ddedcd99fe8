"""A folder of checkpoints: `step-000200` and so on, of which the newest are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from oases.errors import UsageError
from oases.train.checkpoint.metadata import is_checkpoint

_NAME = re.compile(r"step-(\d{6,})")
_LEFT = re.compile(r"\.step-\d{6,}\.(part|old)")
_BROKEN = ".broken"


def folder_of(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return Path(folder) / f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint's folder tells. ValueError for another name."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path.name!r} is no name of a checkpoint's folder, such as step-000200")
    return int(found[1])


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, newest first; empty where there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def require_folder(folder: str | Path) -> Path:
    """Raise UsageError unless checkpoints may be written into `folder`: absent, empty, or one that holds some."""
    path = Path(folder).resolve()
    if path.exists() and not path.is_dir():
        raise UsageError(f"checkpoint {str(folder)!r} is a file; give the path of a folder of its own")
    if is_checkpoint(path):
        raise UsageError(f"checkpoint {str(folder)!r} is one itself; give the folder that shall hold one per step")
    if path.is_dir():
        names = [item.name for item in path.iterdir()]
        if names and not any(_NAME.match(name) or _LEFT.fullmatch(name) for name in names):
            raise UsageError(
                f"checkpoint {str(folder)!r} holds other files, among which none is a checkpoint; give a new or "
                "empty folder"
            )
    return path


def tidy(folder: str | Path) -> None:
    """Remove what a run left that ended while it wrote or removed a checkpoint."""
    for path in Path(folder).glob(".step-*"):
        if _LEFT.fullmatch(path.name):
            shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Rename a broken checkpoint, so that it is no candidate any more; returns its new path."""
    target = path.with_name(path.name + _BROKEN)
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


def prune(folder: str | Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0: none."""
    for path in checkpoints(folder)[keep:] if keep else []:
        # Under another name first: a folder half removed must not look like a checkpoint.
        shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))
