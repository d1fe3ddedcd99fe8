"""Loading of a checkpoint into a model of any degrees, and export of its weights to one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import oases.checkpoint.retention as retention
from oases.checkpoint.integrity import find_fault
from oases.checkpoint.metadata import Metadata, is_checkpoint
from oases.checkpoint.state import WEIGHTS, Stored, finish_loading, generators, random_name, state_to_load
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
from oases.distributed.failures import raise_together
from oases.distributed.shard_map import shard_map
from oases.errors import UsageError
from oases.safetensors_files import write_header

LISTED = 4
"""Differences of models listed in a message; the rest is counted."""


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, group: ProcessGroup | None
) -> Metadata:
    """Read a checkpoint that was verified into a model and its optimizer, in place; return its metadata. Collective.

    Without an optimizer the model alone; with one, random states are restored too: those of rank 0 on every rank if
    the number of ranks differs. UsageError on all ranks, with nothing changed, for one of another format or of
    another model.
    """
    from oases.checkpoint import storage  # slow to import

    path = Path(path)
    record = Metadata.read(path)
    reader = storage.Reader(path)
    stored = reader.stored()  # an error on all ranks alike
    names = _stored_names(path, model, stored, record, group)
    wanted = state_to_load(model, optimizer, group, names, stored)
    random: dict[str, torch.Generator] = {}
    if optimizer is not None:
        rank = group_rank(group) if record.ranks == group_size(group) else 0
        known = {name: each for name, each in generators(model).items() if name in record.random}
        random = {random_name(name, rank): each for name, each in known.items()}
    reader.load(wanted | (states := {name: each.get_state() for name, each in random.items()}), group)
    if optimizer is not None:
        finish_loading(model, optimizer, group, record.optimizer.get("numbers", {}))
    for name, each in random.items():
        each.set_state(states[name])
    return record


def _stored_names(
    path: Path, model: nn.Module, stored: Mapping[str, Stored], record: Metadata, group: ProcessGroup | None
) -> dict[str, str]:
    """Name in the checkpoint of each tensor that this rank has. UsageError on all ranks for another model."""
    found: dict[str, str] = {}
    known: set[str] = set()
    held: set[str] = set()
    wrong: list[str] = []
    with raise_together(group):
        for shard in shard_map(model, group):
            names = [record.names.get(name, name) for name in shard.names]
            names = [name for name in names if WEIGHTS + name in stored]
            if not names:
                wrong.append(f"it lacks {shard.name!r}")
                continue
            shape = stored[WEIGHTS + names[0]][0]
            if shape != shard.shape:
                wrong.append(f"{names[0]!r} has shape {shape} there and {shard.shape} here")
            known.update(names)
            if not shard.tensor.is_meta:
                found[shard.name] = names[0]
                held.update(names)
    everyone = all_gather_objects((wrong, known, held), group)
    wrong = list(dict.fromkeys(each for theirs, *_ in everyone for each in theirs))
    known, held = ({name for each in everyone for name in each[at]} for at in (1, 2))
    weights = (name.removeprefix(WEIGHTS) for name in stored if name.startswith(WEIGHTS))
    wrong += [f"unexpected tensor {name!r}" for name in weights if name not in known]
    if known - held:
        wrong.append(f"{min(known - held)!r} is on meta on every rank here")
    if wrong:
        more = f" and {len(wrong) - LISTED} more differences" if len(wrong) > LISTED else ""
        raise UsageError(
            f"checkpoint {str(path)!r} is not of this {type(model).__name__}: {'; '.join(wrong[:LISTED])}{more}; "
            "build the model that was saved"
        )
    return found


def newest_of(checkpoint: str | Path) -> Path:
    """The checkpoint, or the newest one in a folder of them."""
    path = Path(checkpoint)
    return path if is_checkpoint(path) else next(iter(retention.checkpoints(path)), path)


def require_intact(path: Path, group: ProcessGroup | None = None) -> None:
    """Raise UsageError where a checkpoint's files are not as they were written. Collective."""
    if fault := find_fault(path, group):
        raise UsageError(f"checkpoint {str(path)!r} is corrupt: {fault}; use another")


def export(
    checkpoint: str | Path, file: str | Path, named: Callable[[list[str]], Mapping[str, str]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint's weights to `file`, replacing it; return their shapes by name.

    checkpoint: of any parallel degrees, or a folder of checkpoints for the newest. named: (names of the weights) ->
    those to write, by name in the file; None: all, under their own names. Runs in one process, tensor by tensor, with
    memory for the largest one. The file appears by a rename, once complete. UsageError for an invalid or corrupt
    checkpoint, one of another format, and a file that cannot be written.
    """
    from oases.checkpoint import storage  # slow to import

    path, file = newest_of(checkpoint), Path(file)
    Metadata.read(path)
    if file.exists() and not file.is_file():  # a rename would replace a device
        raise UsageError(f"{str(file)!r} is not a file; give the path of a file to write")
    require_intact(path)
    reader = storage.Reader(path)
    stored = {
        name.removeprefix(WEIGHTS): found for name, found in reader.stored().items() if name.startswith(WEIGHTS)
    }
    names = {name: name for name in stored} if named is None else named([*stored])
    header = {ours: (stored[name][1], stored[name][0]) for ours, name in names.items()}
    aside = file.with_name(f".{file.name}.part")
    try:
        with aside.open("wb") as out:
            begins = write_header(out, header)
            for name, (dtype, shape) in header.items():
                tensor = torch.empty(shape, dtype=dtype)
                reader.load({WEIGHTS + names[name]: tensor}, None)
                out.seek(begins[name])
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        aside.rename(file)
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be written: {error.strerror}; give another path") from error
    finally:
        with suppress(OSError):
            aside.unlink()
    return {name: shape for name, (_, shape) in header.items()}
