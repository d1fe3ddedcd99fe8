"""Choice of the checkpoint to resume from: the one given, or the newest valid one of the run itself."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import oases.checkpoint.retention as retention
from oases.checkpoint.integrity import INDEX, find_fault
from oases.checkpoint.metadata import RECORD, Metadata, NewerFormatError, is_checkpoint
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
from oases.errors import UsageError

AUTO = "auto"
"""Value of `resume` for the newest checkpoint in the run's own folder, or the start."""


def starting_checkpoint(
    own: str | None, resume: str | None, resumes_newest: bool, group: ProcessGroup | None
) -> Path | None:
    """Find the checkpoint to resume from; None: start from scratch. Collective; the same on all ranks.

    own: folder that the run writes to. resume: the option's value. resumes_newest: the run was restarted, or resume
    is "auto"; then the newest valid checkpoint in `own` comes first. The result's checksums are verified. Corrupt
    checkpoints are skipped with a warning that names file and fault, and renamed in `own`. UsageError for a given
    checkpoint that is corrupt, for one that not all ranks see, and for a folder with later checkpoints than the one
    to resume from, which would count as newer than those the run writes.
    """
    found = None
    if own is not None:
        if group_rank(group) == 0:
            retention.tidy(own)
        if resumes_newest:
            found = _newest(own, group)
    if found is None and resume is not None and resume != AUTO:
        found = valid_checkpoint(Path(resume), group)
    if own is not None:
        step = 0 if found is None else Metadata.read(found).step
        require_latest(own, step, group, "give --resume auto to resume from the newest, or a new folder")
    return found


def resumed_backend(own: str | None, resume: str | None, resumes_newest: bool) -> str | None:
    """Backend of the run that one with these options continues; None where it starts anew. Before any rank starts.

    That of the newest checkpoint whose record can be read: "gloo" where it names none, as in versions before 0.2.
    None where one rank wrote it, without sums.
    """
    given = None if resume in (None, AUTO) else Path(str(resume))
    candidates = [*retention.checkpoints(own)] if own is not None and resumes_newest else []
    if given is not None:
        candidates += [given] if is_checkpoint(given) else retention.checkpoints(given)
    for path in candidates:
        if not _record_fault(path):
            record = Metadata.read(path)
            return None if record.ranks == 1 else record.backend or "gloo"
    return None


def require_resumable(own: str | None, resume: str | None, resumes_newest: bool, sizes: dict[str, Any]) -> None:
    """Check before any rank starts. UsageError unless there is a checkpoint of these sizes, if one is needed."""
    if resumes_newest:
        for path in retention.checkpoints(own or "")[:1]:
            if not _record_fault(path):  # else the ranks skip it
                _fits(path, sizes)
    if resume is None or resume == AUTO:
        return
    path = Path(resume)
    if not is_checkpoint(path):
        inside = retention.checkpoints(path)
        if not inside:
            Metadata.read(path)  # raises: not a checkpoint
        path = inside[0]
    _fits(path, sizes)


def _fits(path: Path, sizes: dict[str, Any]) -> None:
    # Without metadata it is corrupt, which the ranks will report.
    if is_checkpoint(path):
        Metadata.read(path).require_sizes(sizes, path)


def valid_checkpoint(given: Path, group: ProcessGroup | None) -> Path:
    """Find a checkpoint: `given` itself, or the newest valid one in it; a warning names those skipped. Collective.

    UsageError where it is corrupt, where none is valid, and for any other folder or one that not all ranks see.
    """
    require_seen(given, group)
    if is_checkpoint(given):
        fault = find_fault(given, group)
        if fault:
            raise UsageError(f"checkpoint {str(given)!r} is corrupt: {fault}; use another")
        return given
    if not retention.checkpoints(given):
        Metadata.read(given)  # raises: not a checkpoint
    found = _newest(given, group)
    if found is None:
        raise UsageError(f"{str(given)!r} holds no valid checkpoint; give another folder")
    return found


def _newest(folder: str | Path, group: ProcessGroup | None) -> Path | None:
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
    if found := find_fault(path, group):
        return found
    mine = _record_fault(path) or _index_fault(path) or _shard_fault(path, group)
    return next(filter(None, all_gather_objects(mine, group)), "")


def _record_fault(path: Path) -> str:
    try:
        Metadata.read(path)
    except NewerFormatError:
        raise  # skipping it would lose steps
    except UsageError as error:
        return f"{RECORD} cannot be read ({error.__cause__ or error})"
    return ""


def _index_fault(path: Path) -> str:
    from oases.checkpoint.reader import CheckpointReader  # takes half a second

    try:
        CheckpointReader(path).read_metadata()
    except UsageError as error:
        return f"{INDEX} cannot be read ({error.__cause__ or error})"
    return ""


def _shard_fault(path: Path, group: ProcessGroup | None) -> str:
    """Fault of this rank's share of the parts."""
    from oases.checkpoint.reader import CheckpointReader  # takes half a second

    return CheckpointReader(path).shard_fault(group_rank(group), group_size(group))


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
