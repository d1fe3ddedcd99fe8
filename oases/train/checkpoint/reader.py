"""Reader of a checkpoint's tensors that runs no code from its files.

torch.distributed.checkpoint keeps its metadata as a pickle, which can name any function. Here it may name the classes
of such metadata only; what it says is checked against the files before a tensor is read. Imported where it is used,
because torch.distributed.checkpoint takes half a second to import.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from oases.errors import UsageError
from oases.limits import short
from oases.train.checkpoint.integrity import INDEX, listed_files, open_file
from oases.train.checkpoint.state import Stored

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
"""Names that the metadata may refer to, by module."""


def _member(kind: Any, name: Any) -> Any:
    """Member of an enum, in place of getattr, by which Python 3.11.2 pickles enums, and 3.11.7 does not."""
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise UsageError(f"it takes {short(name)} of {short(kind)}, which is no part of a checkpoint")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise UsageError(f"it refers to {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """Storage reader for a checkpoint whose checksums were verified. Raises UsageError for metadata that is invalid,
    refers to code or to files that the checksums do not list, or does not fit the files.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._folder = Path(folder)
        self._found: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the metadata, once."""
        if self._found is None:
            try:
                with open_file(self._folder, INDEX) as file:
                    found = _Unpickler(file).load()
                _check(found, {name: (self._folder / name).stat().st_size for name in listed_files(self._folder)})
                found.storage_meta.load_id = self.load_id
            except Exception as error:  # pickles and what they hold fail in any way
                raise UsageError(
                    f"checkpoint {str(self._folder)!r} is corrupt: {INDEX} cannot be read "
                    f"({str(error) or type(error).__name__}); use another"
                ) from error
            self._found = found
        return self._found

    def stored(self) -> dict[str, Stored]:
        """Full shape and dtype of each tensor, by name."""
        tensors = self.read_metadata().state_dict_metadata.items()
        return {
            name: (tuple(each.size), each.properties.dtype)
            for name, each in tensors
            if isinstance(each, TensorStorageMetadata)
        }


def _check(found: Any, sizes: Mapping[str, int]) -> None:
    """Raise UsageError unless metadata describes tensors that files of these sizes hold."""
    if not isinstance(found, Metadata):
        raise UsageError(f"it is a {type(found).__name__}")
    for place in found.storage_data.values():
        file = place.relative_path
        if file not in sizes:
            raise UsageError(f"it refers to {file!r}, which the checksums do not list")
        if not 0 <= place.offset <= place.offset + place.length <= sizes[file]:
            raise UsageError(f"{file} ends before byte {place.offset + place.length}")
        if getattr(place, "transform_descriptors", None):
            raise UsageError(f"{file} is transformed by {', '.join(place.transform_descriptors)}")
    bytes_in_all = sum(sizes.values())
    for name, kept in found.state_dict_metadata.items():
        if not isinstance(kept, TensorStorageMetadata):
            raise UsageError(f"{name} is no tensor")
        if kept.size.numel() * kept.properties.dtype.itemsize > bytes_in_all:
            raise UsageError(f"{name} of shape {tuple(kept.size)} is larger than all files")
