"""With which checkpoint a run begins: the one it was given, or the newest good one of those it wrote before."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import oases.train.checkpoint.retention as retention
from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_rank
from oases.train.checkpoint.coordination import all_gather_objects
from oases.train.checkpoint.integrity import find_fault
from oases.train.checkpoint.metadata import Metadata, is_checkpoint

AUTO = "auto"
"""As what to resume: the newest checkpoint of the run's own folder, or the start."""


def starting_checkpoint(
    own: str | None, resume: str | None, resumes_newest: bool, group: ProcessGroup | None
) -> Path | None:
    """The checkpoint that a run begins with, the same on all ranks, which call it together; None: from the start.

    own: the folder that the run writes to. resume: what it was given. A run that goes on, because a launcher has
    started it again or resume is "auto", begins with the newest good one in its own folder, if there is one. What is
    returned was read through and is whole. Broken ones are skipped with a warning that names file and fault, and set
    aside where this run is going to write. UsageError for a checkpoint given that is broken, and for a folder with
    later ones than the run begins with: they would count as newer than what it writes.
    """
    found = None
    if own is not None:
        if group_rank(group) == 0:
            retention.tidy(own)
        if resumes_newest:
            found = _newest(own, group)
    if found is None and resume is not None and resume != AUTO:
        found = _whole(Path(resume), group)
    if own is not None:
        _require_latest(own, 0 if found is None else Metadata.read(found).step, group)
    return found


def require_resumable(own: str | None, resume: str | None, resumes_newest: bool, sizes: dict[str, Any]) -> None:
    """What can be said before any rank starts: UsageError unless there is something of these sizes to begin with."""
    if resumes_newest:
        for path in retention.checkpoints(own or "")[:1]:
            _fits(path, sizes)
    if resume is None or resume == AUTO:
        return
    path = Path(resume)
    if not is_checkpoint(path):
        inside = retention.checkpoints(path)
        if not inside:
            Metadata.read(path)  # says that it is none
        path = inside[0]
    _fits(path, sizes)


def _fits(path: Path, sizes: dict[str, Any]) -> None:
    # One that has lost its record is broken, which the ranks will find and tell.
    if is_checkpoint(path):
        Metadata.read(path).require_sizes(sizes, path)


def _whole(given: Path, group: ProcessGroup | None) -> Path:
    if is_checkpoint(given):
        fault = find_fault(given, group)
        if fault:
            raise UsageError(f"checkpoint {str(given)!r} is broken: {fault}; take another")
        return given
    if not retention.checkpoints(given):
        Metadata.read(given)  # says that it is none
    found = _newest(given, group)
    if found is None:
        raise UsageError(f"resume {str(given)!r} holds no whole checkpoint; give another folder")
    return found


def _newest(folder: str | Path, group: ProcessGroup | None) -> Path | None:
    """The newest good checkpoint in a folder."""
    candidates = all_gather_objects([str(path) for path in retention.checkpoints(folder)], group)[0]
    for path in map(Path, candidates):
        fault = find_fault(path, group)
        if not fault:
            Metadata.read(path)  # a newer format is no fault of the files, and skipping it would lose steps
            return path
        if group_rank(group) == 0:
            warnings.warn(f"checkpoint {str(path)!r} is broken and skipped: {fault}", stacklevel=2)
    return None


def _require_latest(folder: str | Path, step: int, group: ProcessGroup | None) -> None:
    later = all_gather_objects([str(path) for path in retention.checkpoints(folder)], group)[0]
    for path in map(Path, later):
        if retention.step_of(path) <= step:
            break
        if not find_fault(path, group):
            raise UsageError(
                f"checkpoint {str(folder)!r} holds {path.name}, which is later than the step {step} that this run "
                "begins with; give --resume auto to go on from the newest, or a new folder"
            )
        all_gather_objects(None, group)  # nobody moves it before everybody has looked
        if group_rank(group) == 0:
            moved = retention.set_aside(path)
            warnings.warn(f"broken checkpoint {str(path)!r} is now {moved.name!r}", stacklevel=2)
