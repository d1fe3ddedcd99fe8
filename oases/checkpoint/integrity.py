"""Checksums of a checkpoint's files, to detect corruption, and reading of files that may be anything."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from oases.checkpoint.metadata import RECORD, write_synced
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
from oases.errors import UsageError
from oases.files import parse_json

CHECKSUMS = "checksums.json"
"""File with {"files": {NAME: SHA-256}, "sha256": of "files"}; the same in every checkpoint format."""

INDEX = ".metadata"
"""Metadata of torch.distributed.checkpoint: shapes of tensors and the places of their shards."""

_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 1 << 26
_MOST_INDEX_BYTES = 1 << 25


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of a folder. OSError for anything else: links, devices, pipes, files of other folders."""
    if Path(name).name != name:
        raise OSError(f"{name!r} is not the name of a file in the checkpoint")
    # O_NONBLOCK: the opening of a pipe would wait for its writer.
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name!r} is not a regular file")
    return os.fdopen(descriptor, "rb")


def listed_files(folder: Path) -> dict[str, str]:
    """SHA-256 of a checkpoint's files as it lists them, by name. Raises OSError, ValueError or RecursionError."""
    with open_file(folder, CHECKSUMS) as file:
        given = parse_json(file.read(_MOST_BYTES), CHECKSUMS, "use another")
    if not isinstance(given, dict) or not isinstance(files := given.get("files"), dict):
        raise ValueError("it lists no files")
    if given.get("sha256") != _of(files) or not {RECORD, INDEX} <= files.keys():
        raise ValueError("it is not as it was written")
    return files


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files, by name."""
    found = {}
    for file in files:
        digest = hashlib.sha256()
        with open_file(file.parent, file.name) as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
        found[file.name] = digest.hexdigest()
    return found


def index_limit(folder: Path, names: Iterable[str]) -> int:
    """Maximum bytes of a checkpoint's index, by what its files hold: its objects take many times as much memory.

    Each rank's part of a tensor takes some 200 bytes there.
    """
    return max(_MOST_INDEX_BYTES, sum((folder / name).stat().st_size for name in names if name != INDEX) // 256)


def require_readable(folder: Path, names: Iterable[str]) -> None:
    """Raise UsageError where a checkpoint about to be completed would be refused for the size of its index."""
    size, most = (folder / INDEX).stat().st_size, index_limit(folder, names)
    if size > most:
        raise UsageError(f"{INDEX} has {size} bytes, and at most {most} are read again; save from fewer ranks")


def write_checksums(folder: Path, files: Mapping[str, str]) -> None:
    """Write the checksums of a folder's files, and a checksum of those."""
    write_synced(folder / CHECKSUMS, json.dumps({"files": dict(files), "sha256": _of(files)}, indent=1))


def find_fault(folder: Path, group: ProcessGroup | None) -> str:
    """Verify the files of a checkpoint; returns a description of the first fault, or "".

    Collective over all ranks; each verifies its share of the files, and all return the same.
    """
    return next((fault for fault in all_gather_objects(_fault(folder, group), group) if fault), "")


def _fault(folder: Path, group: ProcessGroup | None) -> str:
    try:
        files = listed_files(folder)
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    for name in sorted(files)[group_rank(group) :: group_size(group)]:
        try:
            if Path(name).name != name or checksums([folder / name])[name] != files[name]:
                return f"{name} is not as it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
    return ""


def _of(files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(files.items()))).encode()).hexdigest()
