"""Checksums of a checkpoint's files, to detect corruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from oases.execution.group import ProcessGroup, group_rank, group_size
from oases.train.checkpoint.coordination import all_gather_objects
from oases.train.checkpoint.metadata import RECORD, write_synced

CHECKSUMS = "checksums.json"
"""File with {"files": {NAME: SHA-256}, "sha256": of "files"}; the same in every checkpoint format."""

_BLOCK_BYTES = 1 << 20


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files, by name."""
    found = {}
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
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
        given = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        files, own = given["files"], given["sha256"]
        if own != _of(files) or RECORD not in files:
            return f"{CHECKSUMS} is not as it was written"
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    for name in sorted(files)[group_rank(group) :: group_size(group)]:
        try:
            if checksums([folder / name])[name] != files[name]:
                return f"{name} is not as it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def _of(files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(files.items()))).encode()).hexdigest()
