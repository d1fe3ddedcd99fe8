"""Checkpoints of parallelized models and their optimizers, of any class: `save_checkpoint` and `load_checkpoint`.

Ranks first exchange what each has: names of tensors, of which tied ones have several, options of the optimizer's
parameter groups, and errors. So a checkpoint is refused by all ranks or none, and before anything is written.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import oases.checkpoint.retention as retention
from oases.checkpoint.contents import (
    Contents,
    choices_of,
    require_all_trained,
    saved_groups,
    set_choices,
    set_options,
    set_streams,
)  # fmt: skip
from oases.checkpoint.files import load
from oases.checkpoint.lock import FolderLock
from oases.checkpoint.metadata import Metadata, is_checkpoint, require_readable
from oases.checkpoint.resume import require_latest, require_seen, valid_checkpoint
from oases.checkpoint.state import random_streams, state
from oases.checkpoint.writer import CheckpointWriter
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
from oases.distributed.failures import raise_together
from oases.distributed.mesh import run_of
from oases.errors import UsageError
from oases.files import MOST_BYTES
from oases.limits import short


class LoadedStep(int):
    """Step of the checkpoint that was loaded. extra: what was saved with it. path: its folder."""

    extra: dict[str, Any]
    path: Path


@dataclass
class SavedCheckpoint:
    """Checkpoint that is written, or being written in the background. path: its folder."""

    path: Path
    _writer: CheckpointWriter = field(repr=False)

    def finish(self) -> Path:
        """Wait until it is written; return its path. Collective. SaveError on all ranks if it could not be."""
        self._writer.wait()
        return self.path


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    keep: int = 0,
    asynchronous: bool = False,
    extra: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
) -> SavedCheckpoint:
    """Write a checkpoint of a parallelized model to `folder`, as step-000200 for step 200. All ranks call it.

    It holds the full model in shards, the optimizer's state and options, and random states. Its files have checksums,
    and its folder gets its name once complete: a run killed at any moment leaves it whole or not at all. Any mesh of
    any degrees loads it. keep: number of newest checkpoints to keep in the folder, 0: all. asynchronous: copy the
    state to CPU memory and write it in the background; the next save and `finish()` of what is returned wait for it,
    and raise its errors. Call `finish()` after the last one. extra: JSON values to keep with it; those of rank 0.
    process_group: all ranks that train the model; None: those of its mesh, or the default group.

    Raises UsageError on all ranks, before anything is written, for an optimizer of other parameters or with state
    that is neither of its parameter's shape nor scalar, and for a folder that holds other files or later checkpoints
    or is in use by another run; SaveError, a UsageError, where writing fails: earlier checkpoints stay.
    """
    model, optimizer = _bare(model), _bare_optimizer(optimizer)
    group = run_of(model, process_group)
    with raise_together(group):
        retention.require_folder(folder)
        _require_counts(step, keep)
        kept = _copied(dict(extra or {}))
        mine = Contents.of(model, optimizer, group, step)
    contents = Contents.merged(all_gather_objects(mine, group))
    writer = _writer_of(folder, keep, group)
    writer.wait()
    require_latest(folder, step, group, "resume from it by oases.load_checkpoint, or give a new folder")
    record = Metadata(
        step=step,
        updates=step,
        sizes={},
        ranks=group_size(group),
        random=random_streams(model) if optimizer is not None else [],
        names={name: main for name, main in contents.names.items() if name != main},
        optimizer=contents.optimizer,
        streams=contents.streams,
        choices=choices_of(model, group),
        extra=kept,
    )
    writer.start(state(model, optimizer, group, contents.names), record, copied=asynchronous)
    if not asynchronous:
        writer.wait()
    return SavedCheckpoint(retention.folder_of(Path(folder).resolve(), step), writer)


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: ProcessGroup | None = None,
) -> LoadedStep:
    """Read a checkpoint of `save_checkpoint` into a model and its optimizer, in place. All ranks call it.

    folder: a checkpoint, or a folder of several for the newest valid one; a warning names those that are corrupt. The
    mesh, ZeRO-1 and master weights may be others than those that saved. With an optimizer, options of its parameter
    groups and random states are restored, too; those of rank 0 on every rank if the number of ranks differs. Returns
    the step, an int with `extra` and `path`.

    Raises UsageError on all ranks, with nothing changed, where the folder is missing, no checkpoint in it is valid,
    or the newest is of another model or optimizer.
    """
    model, optimizer = _bare(model), _bare_optimizer(optimizer)
    group = run_of(model, process_group)
    if _open is not None and _open.serves(_open.folder, group):
        _open.wait()
    require_seen(folder, group)
    if not Path(folder).is_dir():
        raise UsageError(f"checkpoint {str(folder)!r} is no folder; give one that save_checkpoint wrote to")
    if group_rank(group) == 0 and not is_checkpoint(folder):
        _tidy(Path(folder))
    path = valid_checkpoint(Path(folder), group)
    record = Metadata.read(path)
    with raise_together(group):
        mine = Contents.of(model, optimizer, group, record.step)
        groups = [] if optimizer is None else saved_groups(path, record, mine, optimizer)
    everyone = all_gather_objects(mine, group)
    if optimizer is not None:
        require_all_trained(path, record, everyone)
    load(path, model, optimizer, group)
    for each, options in groups:
        set_options(each, options)
    if optimizer is not None:
        set_streams(model, record.streams)
        set_choices(model, record.choices, group)
    step = LoadedStep(record.step)
    step.extra, step.path = record.extra, path
    return step


# --- loading ---


def _tidy(folder: Path) -> None:
    """Give a checkpoint its name back whose replacement was cut off, unless a run that writes here will do so."""
    if any(folder.glob(".step-*")):
        with suppress(UsageError):
            lock = FolderLock(folder, patience_seconds=0)
            retention.tidy(folder)
            lock.release()


# --- saving ---

_open: CheckpointWriter | None = None
"""Writer of the last call of `save_checkpoint`; it holds its folder until a call for another one, or the end."""


def _writer_of(folder: str | Path, keep: int, group: ProcessGroup | None) -> CheckpointWriter:
    global _open
    path = Path(folder).resolve()
    if _open is not None and not _open.serves(path, group):
        _open.close()
        _open = None
    if _open is None:
        _open = CheckpointWriter(path, keep, group)
    _open.keep = keep
    return _open


@atexit.register
def _finish_at_exit() -> None:
    """Wait for a pending checkpoint, with a warning if it cannot be completed."""
    global _open
    if _open is not None:
        _open.settle()
        _open = None


def _bare(model: nn.Module) -> nn.Module:
    """The model in a DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _bare_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer in a wrapper, such as that of accelerate. UsageError for ZeroRedundancyOptimizer."""
    if hasattr(optimizer, "consolidate_state_dict"):
        raise UsageError(
            f"{type(optimizer).__name__} hides its shards of the state; use oases.make_optimizer(..., zero=True)"
        )
    inner = getattr(optimizer, "optimizer", None)
    return _bare_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _require_counts(step: Any, keep: Any) -> None:
    for name, value in (("step", step), ("keep", keep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{name} is {short(value)}; give a whole number from 0")


def _copied(extra: dict[str, Any]) -> dict[str, Any]:
    """Values as they will be read, since the caller may go on to change its own. UsageError where these differ."""
    found: Any = None
    with suppress(TypeError, ValueError, RecursionError):
        found = json.dumps(extra)
    if found is not None:
        found = require_readable(found, "extra", MOST_BYTES // 2)  # the rest of the record has room, too
    if found != extra:
        raise UsageError(
            f"extra is {short(extra)}; give what JSON can hold: numbers, strings, lists, dicts with strings as keys"
        )
    return dict(found)
