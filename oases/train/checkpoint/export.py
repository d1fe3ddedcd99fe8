"""The weights of a checkpoint as one file of safetensors: whole tensors under the names the model has for them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import oases.train.checkpoint.retention as retention
from oases.errors import UsageError
from oases.safetensors_files import write_header
from oases.train.checkpoint.integrity import fault_of
from oases.train.checkpoint.record import Record, is_checkpoint

_WEIGHTS = "model."


def export(checkpoint: str | Path, file: str | Path) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint's weights to `file`, replacing it; return their shapes by name.

    checkpoint: one, written by ranks of any degrees, or a folder of them for the newest. One process does it, tensor
    by tensor, so the largest one is what it needs memory for. The file appears when it is whole. UsageError for a
    checkpoint that is none, is broken or is of a newer format, and for a file that cannot be written.
    """
    path, file = Path(checkpoint), Path(file)
    if not is_checkpoint(path):
        path = next(iter(retention.checkpoints(path)), path)
    Record.read(path)
    fault = fault_of(path, None)
    if fault:
        raise UsageError(f"checkpoint {str(path)!r} is broken: {fault}; take another")
    stored = {
        name.removeprefix(_WEIGHTS): kept
        for name, kept in FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if name.startswith(_WEIGHTS) and isinstance(kept, TensorStorageMetadata)
    }
    header = {name: (kept.properties.dtype, tuple(kept.size)) for name, kept in stored.items()}
    aside = file.with_name(f".{file.name}.part")
    try:
        with aside.open("wb") as out:
            begins = write_header(out, header)
            for name, (dtype, shape) in header.items():
                tensor = torch.empty(shape, dtype=dtype)
                dcp.load({_WEIGHTS + name: tensor}, checkpoint_id=path, no_dist=True)
                out.seek(begins[name])
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        aside.rename(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UsageError(f"{str(file)!r} cannot be written: {error.strerror}; give another path") from error
    return {name: shape for name, (_, shape) in header.items()}
