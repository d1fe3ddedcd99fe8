"""Reader of a checkpoint's tensors that runs no code from its files.

torch.distributed.checkpoint keeps its metadata as a pickle, which can name any function. Here it may name the classes
of such metadata only; what it says is checked against the files before a tensor is read. Imported where it is used,
because torch.distributed.checkpoint takes half a second to import.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from oases.checkpoint.integrity import INDEX, index_limit, listed_files, open_file
from oases.checkpoint.state import Stored
from oases.errors import UsageError
from oases.limits import short

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


_REFUSED = (
    "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEWOBJ_EX", "EMPTY_SET", "ADDITEMS", "FROZENSET",
    "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER",
)  # fmt: skip
"""Operations of a pickle that such metadata does not need."""

MOST_CHUNKS = 2**14
"""Maximum number of parts of a tensor, each written by one rank."""


class _Unpickler(pickle._Unpickler):
    """Unpickler in Python, whose operations can be narrowed, and whose memo takes memory for what is in it only."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise UsageError(f"it refers to {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)

    def load_setitems(self) -> None:
        """Set items of a dictionary, by keys whose hash is cheap."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._set(items)

    def load_setitem(self) -> None:
        """Set one item."""
        value = self.stack.pop()  # type: ignore[attr-defined]
        self._set([self.stack.pop(), value])  # type: ignore[attr-defined]

    def _set(self, items: list[Any]) -> None:
        into = self.stack[-1]  # type: ignore[attr-defined]
        if type(into) not in (dict, OrderedDict):
            raise UsageError(f"it sets items of a {type(into).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int) and not _is_index(key):
                raise UsageError(f"it has a {type(key).__name__} as a key")
            into[key] = value

    def load_build(self) -> None:
        """Set the state of an object, never of a class or of a member of an enum."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        into = self.stack[-1]  # type: ignore[attr-defined]
        if type(into).__module__ not in _ALLOWED or isinstance(into, (type, Enum)):
            raise UsageError(f"it changes {short(into)}")
        if hasattr(into, "__setstate__"):
            into.__setstate__(state)
        elif type(state) is dict:
            vars(into).update(state)
        else:
            raise UsageError(f"it gives a {type(into).__name__} a {type(state).__name__} as state")

    def load_reduce(self) -> None:
        """Call a function or class of those allowed, with plain arguments."""
        self._require_plain()
        super().load_reduce()  # type: ignore[misc]

    def load_newobj(self) -> None:
        """Make an object, from plain arguments."""
        self._require_plain()
        super().load_newobj()  # type: ignore[misc]

    def _require_plain(self) -> None:
        given = self.stack[-1]  # type: ignore[attr-defined]
        if type(given) is not tuple or not all(_is_plain(each) for each in given):
            raise UsageError(f"it gives {short(self.stack[-2])} other arguments")  # type: ignore[attr-defined]


for _name in _REFUSED:
    _Unpickler.dispatch.pop(getattr(pickle, _name)[0], None)
for _name in ("SETITEM", "SETITEMS", "BUILD", "REDUCE", "NEWOBJ"):
    _Unpickler.dispatch[getattr(pickle, _name)[0]] = getattr(_Unpickler, f"load_{_name.lower()}")


def _is_plain(given: Any) -> bool:
    """Whether an argument takes no time to hash: text, a number, integers, or a class."""
    if type(given) is tuple:
        return all(type(each) is int for each in given)
    return type(given) in (str, int, bool, type(None)) or isinstance(given, type)


def _is_index(key: Any) -> bool:
    return (
        type(key) is MetadataIndex
        and type(key.fqn) is str
        and (key.offset is None or type(key.offset) is torch.Size)
        and (key.index is None or type(key.index) is int)
    )


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
                names = listed_files(self._folder)
                most = index_limit(self._folder, names)
                with open_file(self._folder, INDEX) as file:
                    data = file.read(most + 1)
                if len(data) > most:
                    raise UsageError(f"it is larger than {most} bytes")
                found = _Unpickler(io.BytesIO(data), fix_imports=False).load()
                _check(found, {name: (self._folder / name).stat().st_size for name in names})
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

    def shard_fault(self, first: int, step: int) -> str:
        """Describe a part, of every step-th from the first on, that is not of the described type; "" without one.

        Reads no contents.
        """
        tensors = [(name, each) for name, each in self.read_metadata().state_dict_metadata.items()]
        parts = [
            (name, chunk, each.properties.dtype)
            for name, each in tensors
            if isinstance(each, TensorStorageMetadata)
            for chunk in each.chunks
        ]
        for name, chunk, dtype in parts[first::step]:
            place = self.read_metadata().storage_data[MetadataIndex(name, chunk.offsets)]
            try:
                with open_file(self._folder, place.relative_path) as file:
                    part = torch.load(self._slice_file(file, place), map_location="meta", weights_only=True)
            except Exception as error:  # archives and pickles fail in any way
                return f"{name} in {place.relative_path} cannot be read ({type(error).__name__})"
            if not isinstance(part, torch.Tensor) or (part.shape, part.dtype) != (chunk.sizes, dtype):
                return f"{place.relative_path} holds something else in place of {name}"
        return ""


def _check(found: Any, sizes: Mapping[str, int]) -> None:
    """Raise UsageError unless metadata describes tensors that files of these sizes hold."""
    if not isinstance(found, Metadata):
        raise UsageError(f"it is a {type(found).__name__}")
    if type(found.storage_data) is not dict or type(found.state_dict_metadata) is not dict:
        raise UsageError("it lists no tensors")
    _check_places(found.storage_data, sizes)
    bytes_in_all = sum(sizes.values())
    for name, kept in found.state_dict_metadata.items():
        if type(name) is not str or not isinstance(kept, TensorStorageMetadata):
            raise UsageError(f"{short(name)} is no tensor")
        _check_tensor(name, kept, bytes_in_all)
        for each in kept.chunks:
            if MetadataIndex(name, each.offsets) not in found.storage_data:
                raise UsageError(f"{name} lacks the place of its part at {tuple(each.offsets)}")


def _check_places(places: Mapping[Any, Any], sizes: Mapping[str, int]) -> None:
    for key, place in places.items():
        if not _is_index(key) or type(place) is not _StorageInfo:
            raise UsageError(f"it holds a {type(place).__name__} as a place")
        file, offset, length = place.relative_path, place.offset, place.length
        if type(file) is not str or type(offset) is not int or type(length) is not int:
            raise UsageError(f"{key.fqn} has an invalid place")
        if file not in sizes:
            raise UsageError(f"it refers to {short(file)}, which the checksums do not list")
        if not 0 <= offset < offset + length <= sizes[file]:
            raise UsageError(f"{file} ends before byte {short(offset + length)}")
        if getattr(place, "transform_descriptors", None):
            raise UsageError(f"{file} is transformed by {short(place.transform_descriptors)}")


def _check_tensor(name: str, kept: TensorStorageMetadata, bytes_in_all: int) -> None:
    if type(kept.properties) is not TensorProperties or type(kept.properties.dtype) is not torch.dtype:
        raise UsageError(f"{name} has no dtype")
    if type(kept.size) is not torch.Size or type(kept.chunks) is not list:
        raise UsageError(f"{name} has no shape")
    if math.prod(kept.size) * kept.properties.dtype.itemsize > bytes_in_all:
        raise UsageError(f"{name} of shape {short(tuple(kept.size))} is larger than all files")
    _check_chunks(name, tuple(kept.size), kept.chunks)


def _check_chunks(name: str, shape: tuple[int, ...], chunks: list[Any]) -> None:
    """Raise UsageError unless the parts cover a tensor of this shape, each element once."""
    if len(chunks) > MOST_CHUNKS:
        raise UsageError(f"{name} has {len(chunks)} parts, more than {MOST_CHUNKS}")
    boxes = []
    for each in chunks:
        if type(each) is not ChunkStorageMetadata or {type(each.offsets), type(each.sizes)} != {torch.Size}:
            raise UsageError(f"{name} has an invalid part")
        box = [(at, at + size) for at, size in zip(each.offsets, each.sizes, strict=False)]
        fits = len(each.offsets) == len(each.sizes) == len(shape)
        if not fits or not all(0 <= at <= end <= size for (at, end), size in zip(box, shape, strict=True)):
            raise UsageError(f"{name} has a part outside its shape {shape}")
        boxes.append(box)
    covered = sum(math.prod(end - at for at, end in box) for box in boxes)
    if not chunks or covered != math.prod(shape) or _overlap(boxes):
        raise UsageError(f"the parts of {name} do not cover it once")


def _overlap(boxes: list[list[tuple[int, int]]]) -> bool:
    """Whether any two boxes overlap: a sweep along the dimension that separates most of them."""
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    along = max(range(len(boxes[0])), key=lambda dim: len({box[dim] for box in boxes}))
    active: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[along]):
        active = [each for each in active if each[along][1] > box[along][0]]
        if any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(each, box, strict=True)) for each in active):
            return True
        active.append(box)
    return False
