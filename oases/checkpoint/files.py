"""Sharded checkpoints by torch.distributed.checkpoint: each rank writes its shards; any degrees can load them.

A checkpoint is written to a temporary folder, with a checksum of every file, and renamed once complete. Only
folders that are checkpoints are ever replaced. `export` writes the weights to one safetensors file.
torch.distributed.checkpoint takes half a second to import, so it is imported in the functions that use it.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import oases.checkpoint.retention as retention
from oases.checkpoint.adapters import adapter_names, write_adapter_config
from oases.checkpoint.coordination import SaveError, run_on_all_ranks
from oases.checkpoint.integrity import INDEX, checksums, find_fault, require_readable, write_checksums
from oases.checkpoint.metadata import RECORD, Metadata, is_checkpoint
from oases.checkpoint.state import (
    WEIGHTS,
    LoadedState,
    State,
    Stored,
    generators,
    random_name,
    set_random_states,
    state,
)
from oases.core.execution.failure import raise_together
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
from oases.distributed.shard_map import shard_map
from oases.errors import UsageError, make_folder
from oases.safetensors_files import write_header

# A single process is intended. Filtered once: warning filters are not thread-safe, and a thread writes checkpoints.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

LISTED = 4
"""Differences of models listed in a message; the rest is counted."""


def require_replaceable(path: str | Path) -> Path:
    """Raise UsageError unless `path` may be written: absent, an empty folder, or an earlier checkpoint."""
    given, path = path, Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise UsageError(f"checkpoint {str(given)!r} is a file; give the path of a folder of its own")
    if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
        raise UsageError(
            f"checkpoint {str(given)!r} holds other files, which would be replaced; give a new or empty folder"
        )
    return path


def save(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: Metadata, group: ProcessGroup | None
) -> None:
    """Write model, optimizer and metadata to the folder `path`, replacing an earlier checkpoint. All ranks call it.

    group: all ranks that train the model; replicated tensors are written once. Raises UsageError for a path
    that holds anything else, SaveError where writing failed.
    """
    write(path, state(model, optimizer, group), record, group)


def write(path: str | Path, tensors: State, record: Metadata, group: ProcessGroup | None) -> None:
    """Write what `state` returned with its metadata, as `save` does."""
    path = require_replaceable(path)
    aside, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    _barrier(group)  # no rank writes before all ranks have checked the path
    rank = group_rank(group)

    def prepare() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        record.write(aside)

    def store() -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(tensors, checkpoint_id=aside, process_group=group, no_dist=group is None)

    def seal() -> None:
        files = {name: digest for part in parts for name, digest in part.items()}
        require_readable(aside, files)
        _sync(aside / INDEX)  # torch flushes Python's buffer after its own fsync
        write_checksums(aside, files)
        _sync(aside)
        if path.exists():  # else an earlier run ended here, and `old` is the only one
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        try:
            aside.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)

    what = f"checkpoint {str(path)!r}"
    try:
        _by_first(prepare, what, group)
        run_on_all_ranks(store, what, group)
        own = [RECORD, INDEX] if rank == 0 else []  # besides the shards, which carry the rank in their names
        parts = run_on_all_ranks(
            lambda: checksums([*(aside / name for name in own), *sorted(aside.glob(f"__{rank}_*"))]), what, group
        )
        _by_first(seal, what, group)
    except SaveError:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        _barrier(group)  # no rank checks the path again while it is being removed
        raise


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: ProcessGroup | None,
    *,
    sizes: dict[str, Any] | None = None,
    verify: bool = True,
) -> Metadata:
    """Read a checkpoint into model and optimizer (None: the model alone), in place; return its metadata. Collective.

    With an optimizer, random states are restored too; those of rank 0 on every rank if the number of ranks differs.
    sizes: compared with those of the checkpoint, None: not. verify: compare checksums first. Raises UsageError on
    all ranks, with nothing changed, where the folder is not a checkpoint, is corrupt, has a newer format or holds
    another model.
    """
    path = Path(path)
    record = Metadata.read(path)
    if sizes is not None:
        record.require_sizes(sizes, path)
    fault = find_fault(path, group) if verify else ""
    if fault:
        raise UsageError(f"checkpoint {str(path)!r} is corrupt: {fault}; use another")
    import torch.distributed.checkpoint as dcp

    from oases.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(path)
    stored = reader.stored()  # an error on all ranks alike
    names = _stored_names(path, model, stored, record, group)
    loaded = LoadedState(
        model, optimizer, group, stored, names,
        updates=record.updates if record.format < 3 else None, numbers=record.optimizer.get("numbers", {}),
    )  # fmt: skip
    random = {}
    if optimizer is not None:
        rank = group_rank(group) if record.ranks == group_size(group) else 0
        found = {name: each.get_state() for name, each in generators(model).items() if name in record.random}
        random = {name: random_name(name, rank) for name in found}
        loaded.wanted |= {random[name]: value for name, value in found.items()}
    try:
        dcp.load(loaded.wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:  # no Exception; on all ranks alike
        raise _unreadable(path, error) from error
    loaded.finish()
    set_random_states(model, {name: loaded.wanted[key] for name, key in random.items()})
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
    wrong += [f"it holds {name!r} besides" for name in weights if name not in known]
    if known - held:
        wrong.append(f"{min(known - held)!r} is on meta on every rank here")
    if wrong:
        more = f" and {len(wrong) - LISTED} more differences" if len(wrong) > LISTED else ""
        raise UsageError(
            f"checkpoint {str(path)!r} is not of this {type(model).__name__}: {'; '.join(wrong[:LISTED])}{more}; "
            "build the model that was saved"
        )
    return found


def _unreadable(path: Path, error: BaseException) -> UsageError:
    return UsageError(f"checkpoint {str(path)!r} is corrupt: its shards cannot be read ({error!s:.300}); use another")


def _by_first(action: Callable[[], None], what: str, group: ProcessGroup | None) -> None:
    """Run on rank 0 only; an error is raised on all ranks."""
    run_on_all_ranks(action if group_rank(group) == 0 else lambda: None, what, group)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _barrier(group: ProcessGroup | None) -> None:
    if group_size(group) > 1:
        dist.barrier(group=group)


def export(checkpoint: str | Path, file: str | Path) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint's weights to `file`, replacing it; return their shapes by name.

    checkpoint: of any parallel degrees, or a folder of checkpoints for the newest. Runs in one process, tensor by
    tensor, with memory for the largest one. The file appears by a rename, once complete. UsageError for an invalid or
    corrupt checkpoint, one of a newer format, and a file that cannot be written. Of a run that trained adapters
    (LoRA), `file` is a folder, which peft loads.
    """
    import torch.distributed.checkpoint as dcp

    from oases.checkpoint.reader import CheckpointReader

    path, file = Path(checkpoint), Path(file)
    if not is_checkpoint(path):
        path = next(iter(retention.checkpoints(path)), path)
    settings = Metadata.read(path).config
    adapted = bool(settings.get("lora_rank"))
    if file.exists() and not (file.is_dir() if adapted else file.is_file()):  # a rename would replace a device
        what = "folder for an adapter" if adapted else "file"
        raise UsageError(f"{str(file)!r} is not a {what}; give the path of a {what} to write")
    fault = find_fault(path, None)
    if fault:
        raise UsageError(f"checkpoint {str(path)!r} is corrupt: {fault}; use another")
    reader = CheckpointReader(path)
    stored = {
        name.removeprefix(WEIGHTS): found for name, found in reader.stored().items() if name.startswith(WEIGHTS)
    }
    names = adapter_names(stored) if adapted else {name: name for name in stored}
    header = {ours: (stored[name][1], stored[name][0]) for ours, name in names.items()}
    if adapted:
        make_folder(file, "adapter folder")
        write_adapter_config(file, settings, names)
        file /= "adapter_model.safetensors"
    aside = file.with_name(f".{file.name}.part")
    try:
        with aside.open("wb") as out:
            begins = write_header(out, header)
            for name, (dtype, shape) in header.items():
                tensor = torch.empty(shape, dtype=dtype)
                dcp.load({WEIGHTS + names[name]: tensor}, storage_reader=reader, no_dist=True)
                out.seek(begins[name])
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        aside.rename(file)
    except dcp.api.CheckpointException as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be written: {error.strerror}; give another path") from error
    finally:
        with suppress(OSError):
            aside.unlink()
    return {name: shape for name, (_, shape) in header.items()}
