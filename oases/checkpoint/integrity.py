"""Checksums of a checkpoint's files, to detect corruption; files that are no regular ones are refused."""

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
from oases.files import parse_json

CHECKSUMS = "checksums.json"
"""File with {"files": {NAME: SHA-256}, "sha256": of "files"}; the same in every checkpoint format."""
TENSORS = ".safetensors"
"""End of the names of files of tensors."""

_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 1 << 26


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
        files = _listed(folder)
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    for name in sorted(files)[group_rank(group) :: group_size(group)]:
        try:
            if checksums([folder / name])[name] != files[name]:
                return f"{name} is not as it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, KeyError) as error:
            return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
    return ""


def _listed(folder: Path) -> dict[str, str]:
    """SHA-256 of a checkpoint's files as it lists them, by name. Raises OSError, ValueError or RecursionError."""
    with open_file(folder, CHECKSUMS) as file:
        given = parse_json(file.read(_MOST_BYTES), CHECKSUMS, "use another")
    if not isinstance(given, dict) or not isinstance(files := given.get("files"), dict):
        raise ValueError("it lists no files")
    if given.get("sha256") != _of(files) or RECORD not in files:
        raise ValueError("it is not as it was written")
    if paths := [name for name in files if Path(name).name != name]:
        raise ValueError(f"it lists {paths[0]!r}, which is no file of a checkpoint")
    others = [file.name for file in folder.iterdir() if file.suffix == TENSORS and file.name not in files]
    if others:
        raise ValueError(f"it does not list {others[0]}")
    return files


def _of(files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(files.items()))).encode()).hexdigest()
