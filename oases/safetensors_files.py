"""Reading and writing of safetensors files: headers, slices of tensors, and incremental writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oases.errors import UsageError
from oases.files import read_json

Index = tuple[slice, ...]
"""Index of a slice of a tensor: start and stop of each dimension."""
MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""File names of transformers: a model's single file, and the index of several files."""

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""Dtype codes of the format."""

CODES = {dtype: code for code, dtype in TYPES.items()}

MAPPED_BYTES = 2 << 20
"""Bytes read after which a file is mapped again: touched pages count as memory while they are mapped."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Stored:
    """Tensor that can be read in slices. where: its source, for messages. dtype: None if unknown."""

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[Index], Tensor]


def stored_tensors(source: str | Path | Mapping[str, Tensor]) -> dict[str, Stored]:
    """Tensors available in a source, by name; only headers are read.

    source: a safetensors file, a folder of them with or without an index, an index, or whole tensors by name.
    Raises UsageError with the file, the problem and the remedy.
    """
    if isinstance(source, Mapping):
        return {
            name: Stored("the mapping", tuple(tensor.shape), tensor.dtype, tensor.detach().__getitem__)
            for name, tensor in source.items()
        }
    found: dict[str, Stored] = {}
    for file, names in _files(Path(source)).items():
        held = _File(file).tensors()
        for name in names:
            if name not in held:
                raise UsageError(
                    f"the index in {str(file.parent)!r} says that tensor {name!r} is in {file.name!r}, which lacks "
                    "it; fetch index and files of one and the same model"
                )
        for name, stored in held.items():
            if name in found:
                raise UsageError(
                    f"tensor {name!r} is in {found[name].where!r} and in {stored.where!r}; leave one of the files "
                    "out of the folder, or name the file to load"
                )
            found[name] = stored
    return found


def configuration(source: str | Path | Mapping[str, Tensor]) -> dict[str, Any]:
    """The config.json beside the files; empty if there is none."""
    if isinstance(source, Mapping):
        return {}
    path = Path(source)
    path = (path if path.is_dir() else path.parent) / "config.json"
    return _json(path) if path.is_file() else {}


def write_header(file: BinaryIO, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, int]:
    """Write the header of a file of these tensors and return the offset of each one's first byte.

    Wider dtypes come first, so that every tensor is aligned, then names: equal tensors make equal files.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        if dtype not in CODES:
            raise UsageError(f"tensor {name!r} is of type {dtype}, which safetensors does not support; convert it")
        begins[name], end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + first for name, first in begins.items()}


class _File:
    """One mapped file, remapped as it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._opened = self._open()

    def _open(self) -> Any:
        if not self.path.is_file():  # a pipe would be waited for, a device has no end
            raise UsageError(f"{str(self.path)!r} is not a regular file; give a safetensors file")
        try:
            return safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{str(self.path)!r} is not a complete safetensors file: {error}; it is truncated, corrupt, or a "
                "placeholder of a file not fetched (Git LFS): copy or download it again"
            ) from error

    def tensors(self) -> dict[str, Stored]:
        found = {}
        for name in list(self._opened.keys()):
            view = self._opened.get_slice(name)
            shape, dtype = tuple(view.get_shape()), TYPES.get(view.get_dtype())
            found[name] = Stored(str(self.path), shape, dtype, self._reader(name, shape, dtype))
        return found

    def _reader(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Callable[[Index], Tensor]:
        def read(index: Index) -> Tensor:
            if self._read > MAPPED_BYTES:
                self._opened, self._read = self._open(), 0
            rows = len(range(*index[0].indices(shape[0]))) if index else 1
            self._read += rows * math.prod(shape[1:]) * (dtype.itemsize if dtype else 1)
            return self._opened.get_slice(name)[index or ...]

        return read


def _files(path: Path) -> dict[Path, list[str]]:
    """Files of a source, each with the names of tensors that an index says it holds."""
    if path.suffix in PICKLES:
        raise _pickled(path)
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else {path: []}
    if not path.is_dir():
        raise UsageError(
            f"{str(path)!r} is neither a file nor a folder; nothing is downloaded here: fetch the model first, e.g. "
            "with huggingface_hub.snapshot_download, and give its folder"
        )
    if os.path.lexists(path / MODEL_FILE):
        return {path / MODEL_FILE: []}
    if os.path.lexists(path / INDEX_FILE):
        return _indexed(path / INDEX_FILE)
    if found := sorted(path.glob("*.safetensors")):
        return {file: [] for file in found}
    if pickles := sorted(file for file in path.iterdir() if file.suffix in PICKLES):
        raise _pickled(pickles[0])
    raise UsageError(f"folder {str(path)!r} holds no *.safetensors; give the folder of a saved model")


def _indexed(index: Path) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name, file in _weight_map(index).items():
        files.setdefault(index.parent / file, []).append(name)
    for path, names in files.items():
        if path.suffix in PICKLES:
            raise _pickled(path)
        if not path.is_file():
            raise UsageError(
                f"index {str(index)!r} names {path.name!r} for {len(names)} tensors, but there is no such file; "
                "fetch it again"
            )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    found = _json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UsageError(f"index {str(index)!r} has no 'weight_map' from tensors to files; fetch it again")
    for name in found.values():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UsageError(f"index {str(index)!r} names {name!r} outside its folder; give files in the folder only")
    return found


def _json(path: Path) -> dict[str, Any]:
    found = read_json(path, "index", "fetch it again", strict=False)
    if not isinstance(found, dict):
        raise UsageError(f"{str(path)!r} is not a JSON object; fetch it again")
    return found


def _pickled(path: Path) -> UsageError:
    return UsageError(
        f"{str(path)!r} is a pickle, which can run any code when read; only safetensors are loaded from files. "
        "Convert it with transformers (from_pretrained, then save_pretrained), or load it yourself and give the "
        "tensors: torch.load(path, weights_only=True, mmap=True)"
    )
