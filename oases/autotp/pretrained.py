"""Save a sharded model as one full model that transformers reads with `from_pretrained`."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from oases.autotp.gathering import GatherBuffers, gather_blocks, is_pretrained
from oases.core.execution.group import ProcessGroup, group_rank
from oases.distributed.failures import raise_together
from oases.distributed.mesh import run_of
from oases.distributed.shard_map import ModelTensor, tensors_of_model
from oases.errors import UsageError
from oases.safetensors_files import INDEX_FILE, MODEL_FILE, write_header

WRITTEN = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
)
"""Files of a saved model. Other files in its folder, such as a tokenizer's, are kept when it is saved again."""


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    process_group: ProcessGroup | None = None,
    keep_others: bool = False,
) -> None:
    """Write the full model to `folder`: safetensors, their index if several, and the model's configuration if any.

    Collective over process_group, all ranks of the model (None: those of its mesh, or the default group). They send
    their shards to the first rank, which alone writes, in blocks of rows; no rank holds more than its shards and a
    few blocks. Names, shapes and types are those of the original model; a tied tensor is written once. A file has at
    most max_shard_bytes of tensors, unless one tensor alone has more. The complete folder replaces the old one by a
    rename. keep_others: take a folder with other files, too, which stay.

    UsageError on every rank, before anything is written, for a folder that holds anything but a saved model and for
    weights on `meta`. Errors of the first rank while writing are raised on every rank.
    """
    group, path = run_of(model, process_group), Path(folder).resolve()
    first = group_rank(group) == 0
    aside = path.with_name(f".{path.name}.part")
    whole = tensors_of_model(model, group)
    with raise_together(group):
        tensors = _written(model, whole)
        files = _shards(tensors, max_shard_bytes)
        if first:
            _require_replaceable(path, keep_others)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    failures, wire = [], GatherBuffers()
    for file_name, held in files.items():
        file = _File(aside / file_name, held) if first else None
        for name, tensor in held.items():
            for row, block in gather_blocks(tensor, group, wire):
                if file is not None and block is not None:
                    file.write(name, row, block)
        if file is not None:
            failures.append(file.close())
    with raise_together(group):
        if first:
            for failure in filter(None, failures):
                shutil.rmtree(aside, ignore_errors=True)
                raise failure
            _describe(model, files, aside)
            _replace(path, aside)


class _File:
    """File written by the first rank. It keeps an error until close, because the other ranks keep sending."""

    def __init__(self, path: Path, held: dict[str, ModelTensor]) -> None:
        self._held = held
        self._failure: OSError | None = None
        self._begins: dict[str, int] = {}
        self._file: BinaryIO | None = None
        self._try(lambda: self._open(path))

    def _open(self, path: Path) -> None:
        self._file = path.open("wb")
        sizes = {name: (tensor.dtype, tensor.shape) for name, tensor in self._held.items()}
        self._begins = write_header(self._file, sizes)

    def write(self, name: str, row: int, block: Tensor) -> None:
        """Write rows of a tensor, from `row` on."""
        self._try(lambda: self._put(self._begins[name] + row * self._held[name].row_bytes, block))

    def _put(self, at: int, block: Tensor) -> None:
        assert self._file is not None
        self._file.seek(at)
        self._file.write(block.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> OSError | None:
        """Close the file; return the first error, or None."""
        file = self._file
        if file is not None:
            self._try(file.close)
        return self._failure

    def _try(self, act: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                act()
            except OSError as error:
                self._failure = error


def _written(model: nn.Module, held: list[ModelTensor]) -> dict[str, ModelTensor]:
    """Tensors to write, by name: each once, and again only under a name that transformers would not tie."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    found = {}
    for tensor in held:
        if tensor.leader is None:
            raise UsageError(f"{tensor.names[0]!r} is on meta and has no value to save; load weights first")
        names = [name for name in tensor.names if name not in tensor.aliases] or list(tensor.names[:1])
        for name in names if is_pretrained(model) else tensor.names[:1]:
            if name not in left_out:
                found[name] = tensor
    return found


def _shards(tensors: dict[str, ModelTensor], max_shard_bytes: int) -> dict[str, dict[str, ModelTensor]]:
    """Tensors of each file, in order."""
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}; give at least 1")
    shards: list[dict[str, ModelTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        more = tensor.rows * tensor.row_bytes
        if shards[-1] and size + more > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += more
    if len(shards) == 1:
        return {MODEL_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _describe(model: nn.Module, files: dict[str, dict[str, ModelTensor]], folder: Path) -> None:
    """Write the index of several files and the model's configuration."""
    if len(files) > 1:
        sizes = [tensor.rows * tensor.row_bytes for held in files.values() for tensor in held.values()]
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {name: file for file, held in files.items() for name in held},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if is_pretrained(model):
        pretrained: Any = model
        config = copy.deepcopy(pretrained.config)
        config.architectures = [type(model).__name__]
        config.dtype = str(pretrained.dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        if pretrained.can_generate():
            pretrained.generation_config.save_pretrained(folder)


def _require_replaceable(path: Path, keep_others: bool) -> None:
    """Raise UsageError unless `path` is absent, an empty folder, a saved model, or any folder if asked for."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{str(path)!r} is a file; give the path of a folder of its own")
    saved = (path / MODEL_FILE).is_file() or (path / INDEX_FILE).is_file()
    if path.is_dir() and any(path.iterdir()) and not saved and not keep_others:
        raise UsageError(
            f"{str(path)!r} holds other files but no saved model ({MODEL_FILE} or {INDEX_FILE}); give a new or empty "
            "folder"
        )


def _replace(path: Path, aside: Path) -> None:
    """Rename the new folder to `path`, with the unrelated files of the old one."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        _carry(old, path)  # left by an interrupted save
        path.rename(old)
    aside.rename(path)
    _carry(old, path)


def _carry(old: Path, path: Path) -> None:
    """Move files that a save does not write out of the old folder, if it exists, and remove it."""
    if not old.exists():
        return
    for file in old.iterdir():
        if not WRITTEN.fullmatch(file.name) and not (path / file.name).exists():
            file.rename(path / file.name)
    shutil.rmtree(old)
