"""Where a training run goes on: the checkpoint that `--resume` means, and how it differs from the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import oases.checkpoint.retention as retention
from oases.checkpoint.files import newest_of
from oases.checkpoint.metadata import FormatError, Metadata, is_checkpoint
from oases.checkpoint.resume import newest_valid, require_latest, valid_checkpoint
from oases.core.execution.group import ProcessGroup, group_rank
from oases.errors import UsageError
from oases.models.options import BYTES

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
            found = newest_valid(own, group)
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
        if (record := _record_of(path)) is not None:
            return None if record.ranks == 1 else record.backend or "gloo"
    return None


def _record_of(path: Path) -> Metadata | None:
    """Metadata of a checkpoint; None where it cannot be read. FormatError for another format."""
    try:
        return Metadata.read(path)
    except FormatError:
        raise
    except UsageError:
        return None


def require_resumable(own: str | None, resume: str | None, resumes_newest: bool, sizes: dict[str, Any]) -> None:
    """Check before any rank starts. UsageError unless there is a checkpoint of these sizes, if one is needed."""
    if resumes_newest:
        for path in retention.checkpoints(own or "")[:1]:
            if (record := _record_of(path)) is not None:  # else the ranks skip it
                require_sizes(record, sizes, path)
    if resume is None or resume == AUTO:
        return
    path = newest_of(resume)
    if path == Path(resume) or is_checkpoint(path):  # else it is corrupt, which the ranks will report
        require_sizes(Metadata.read(path), sizes, path)


def require_sizes(record: Metadata, sizes: dict[str, Any], folder: str | Path) -> None:
    """Raise UsageError, naming what differs, unless the checkpoint in `folder` is of a model of these sizes."""
    saved = {"vocabulary": BYTES, "experts": 0} | record.sizes
    for name, size in ({"experts": 0} | sizes).items():
        if saved.get(name) != size:
            raise UsageError(
                f"checkpoint {str(folder)!r} does not fit: {name} is {saved.get(name)} there and {size} here; "
                "give the sizes of the model that was saved"
            )


def differences(record: Metadata, data: dict[str, Any], backend: str, rate: float) -> list[str]:
    """Describe what differs, for warnings that begin with the checkpoint; empty if nothing does.

    data: as in the metadata. backend: of torch.distributed, "" without ranks. rate: learning rate of the next step.
    """
    found = []
    names = {**data, **record.data} if record.data else {}
    there_and_here = {name: (record.data.get(name, "none"), data.get(name, "none")) for name in names}
    there_and_here.pop("next_step", None)
    pairs = there_and_here.items()
    batches = [f"{name} {there} there and {here} here" for name, (there, here) in pairs if there != here]
    if batches:
        found.append(f" resumes with different batches: {', '.join(batches)}")
    # `staged` adds numbers in the order of ranks; gloo and what is built on it (`sim`) in an order of its own.
    saved = record.backend or "gloo"
    if record.ranks > 1 and backend and (saved == "staged") != (backend == "staged"):
        found.append(
            f": its sums were made over {saved}, these are over {backend} and may differ in their last bits; give "
            f"--backend {saved}"
        )
    if record.learning_rate and not math.isclose(record.learning_rate, rate, rel_tol=1e-6):
        found.append(
            f": its next step had the learning rate {record.learning_rate:.4g}, this run's has {rate:.4g}; give the "
            "--steps, --warmup and --learning-rate... of the saved run to go on as it would"
        )
    return found
