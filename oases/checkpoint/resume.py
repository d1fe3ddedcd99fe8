"""Choice of a checkpoint: the one given, or the newest valid one in a folder."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import oases.checkpoint.retention as retention
from oases.checkpoint.files import require_intact
from oases.checkpoint.integrity import find_fault
from oases.checkpoint.metadata import FormatError, Metadata, is_checkpoint
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank
from oases.errors import UsageError


def valid_checkpoint(given: Path, group: ProcessGroup | None) -> Path:
    """Find a checkpoint: `given` itself, or the newest valid one in it; a warning names those skipped. Collective.

    UsageError where it is corrupt, where none is valid, and for any other folder or one that not all ranks see.
    """
    require_seen(given, group)
    if is_checkpoint(given):
        require_intact(given, group)
        return given
    if not retention.checkpoints(given):
        Metadata.read(given)  # raises: not a checkpoint
    found = newest_valid(given, group)
    if found is None:
        raise UsageError(f"{str(given)!r} holds no valid checkpoint; give another folder")
    return found


def newest_valid(folder: str | Path, group: ProcessGroup | None) -> Path | None:
    """Newest valid checkpoint in a folder."""
    candidates = all_gather_objects([str(path) for path in retention.checkpoints(folder)], group)[0]
    for path in map(Path, candidates):
        require_seen(path, group)
        fault = _fault(path, group)
        if not fault:
            return path
        if group_rank(group) == 0:
            warnings.warn(f"checkpoint {str(path)!r} is corrupt and skipped: {fault}", stacklevel=2)
    return None


def _fault(path: Path, group: ProcessGroup | None) -> str:
    """Describe what is wrong with a checkpoint, or "". Collective; the same on all ranks."""
    from oases.checkpoint import storage  # takes half a second

    if found := find_fault(path, group):
        return found
    mine = ""
    try:
        Metadata.read(path)
        storage.Reader(path).read_metadata()
    except FormatError:
        raise  # skipping it would lose steps
    except UsageError as error:
        mine = str(error).partition(" is corrupt: ")[2] or str(error)
    return next(filter(None, all_gather_objects(mine, group)), "")


def require_seen(folder: str | Path, group: ProcessGroup | None) -> None:
    """Raise UsageError on all ranks where some see a folder and others do not: it is not corrupt. Collective."""
    seen = all_gather_objects(os.path.isdir(folder), group)
    if any(seen) and not all(seen):
        raise UsageError(
            f"checkpoint {str(folder)!r} is no folder on rank {seen.index(False)}, and a checkpoint needs a folder "
            "of all ranks; mount it there, or give another"
        )


def require_latest(folder: str | Path, step: int, group: ProcessGroup | None, remedy: str) -> None:
    """Raise UsageError where a folder has valid checkpoints of later steps; corrupt ones are renamed. Collective."""
    later = all_gather_objects([str(path) for path in retention.checkpoints(folder)], group)[0]
    for path in map(Path, later):
        if retention.step_of(path) <= step:
            break
        require_seen(path, group)
        if not _fault(path, group):
            raise UsageError(
                f"checkpoint {str(folder)!r} holds {path.name}, which is later than the step {step} of this run; "
                f"{remedy}"
            )
        all_gather_objects(None, group)  # no rank renames it before all ranks have verified it
        if group_rank(group) == 0:
            moved = retention.set_aside(path)
            warnings.warn(f"corrupt checkpoint {str(path)!r} is renamed to {moved.name!r}", stacklevel=2)
