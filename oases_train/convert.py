"""Conversion of checkpoints of formats 1 to 3, whose index is a pickle, to today's.

The index may name the classes of such an index and no others; parts of tensors are read by torch's own restricted
unpickler. One part at a time is in memory, and those of the file that is being written.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import oases.checkpoint.retention as retention
from oases.checkpoint.files import newest_of, require_intact
from oases.checkpoint.integrity import TENSORS, checksums, open_file, write_checksums
from oases.checkpoint.metadata import FORMAT, Metadata
from oases.checkpoint.state import MOMENTS
from oases.checkpoint.storage import divided
from oases.errors import UsageError
from oases.files import unwritable

_INDEX = ".metadata"
_WITHOUT_STEPS = 3
"""First format that holds each parameter's number of steps; before, it was the run's number of updates."""
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}  # fmt: skip
"""Names that an index may refer to, by module."""


def convert(checkpoint: str | Path, target: str | Path) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint of an older format, or the newest in a folder, to the folder `target` in today's.

    Returns shapes by name. `target` may be an earlier checkpoint, which is replaced when the new one is complete.
    UsageError for a checkpoint of today's format or a corrupt one, and for a target that cannot be written.
    """
    path, final = newest_of(checkpoint), Path(target).resolve()
    record = Metadata.read(path, older=True)
    if record.format == FORMAT:
        raise UsageError(f"checkpoint {str(path)!r} is of format {FORMAT} already; use it as it is")
    require_intact(path)
    retention.require_replaceable(final)
    tensors, places = _read_index(path)
    steps = {
        f"{MOMENTS}{name.removeprefix(MOMENTS).rpartition('.')[0]}.step"
        for name in tensors
        if name.startswith(MOMENTS) and record.format < _WITHOUT_STEPS
    } - tensors.keys()
    try:
        part = retention.begin(final)
        files = divided(places, lambda item: (item[0].fqn, item[1].length))
        for number, held in enumerate(files, start=1):
            parts = {index.fqn: _part(path, place) for index, place in held}
            offsets = {index.fqn: {"saved_offsets": list(index.offset or ())} for index, _ in held}
            if number == 1:
                parts |= {name: torch.tensor(float(record.updates)) for name in steps}
                offsets |= {name: {"saved_offsets": []} for name in steps}
            said = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            save_file(parts, part / f"shard-{number:05}{TENSORS}", metadata=said)
            retention.sync(part / f"shard-{number:05}{TENSORS}")
        dataclasses.replace(record, format=FORMAT).write(part)
        write_checksums(part, checksums(sorted(part.iterdir())))
        retention.complete(part, final)
    except OSError as error:
        raise unwritable("checkpoint", target, error) from error
    return {name: tuple(each.size) for name, each in tensors.items()} | dict.fromkeys(steps, ())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise UsageError(f"it refers to {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


def _read_index(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Tensors by name, and the (name and offset, place) of each part."""
    try:
        with open_file(path, _INDEX) as file:
            found = _Unpickler(file).load()
        tensors, places = found.state_dict_metadata, found.storage_data
        if not all(isinstance(each, TensorStorageMetadata) for each in tensors.values()):
            raise UsageError("it holds objects besides tensors")
        chunks = [(name, chunk.offsets) for name, each in tensors.items() for chunk in each.chunks]
        by_part = {(index.fqn, index.offset): (index, place) for index, place in places.items()}
        return tensors, [by_part[chunk] for chunk in chunks]
    except Exception as error:  # pickles and what they hold fail in any way
        raise _corrupt(path, _INDEX, error) from error


def _part(path: Path, place: Any) -> torch.Tensor:
    try:
        with open_file(path, place.relative_path) as file:
            piece = FileSystemReader(path)._slice_file(file, place)
            found: torch.Tensor = torch.load(piece, map_location="cpu", weights_only=True)
        return found.contiguous()
    except Exception as error:  # archives fail in any way
        raise _corrupt(path, place.relative_path, error) from error


def _corrupt(path: Path, name: str, error: Exception) -> UsageError:
    return UsageError(f"checkpoint {str(path)!r} is corrupt: {name} cannot be read ({error!s:.300}); use another")
