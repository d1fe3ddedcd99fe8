"""Files that a user gives, read as data, and files written for a user.

Reading ends in a UsageError for whatever is no such file: a folder, a pipe, a device, one too large, binary, or no
JSON. So does writing on a full disk.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from oases.errors import UsageError
from oases.limits import short

MOST_BYTES = 2**25
"""Maximum bytes of a text file, unless a reader says otherwise."""
_LONGEST_LINE = 2**24
"""Maximum bytes of one line of JSON Lines."""


def open_regular(path: str | Path, what: str, remedy: str) -> BinaryIO:
    """Open a regular file for reading, without waiting for the other end of a pipe.

    what: begins the UsageError for any other path, remedy: ends it.
    """
    try:
        mode = os.stat(path).st_mode  # opening some devices has an effect of its own, so look first
        if stat.S_ISREG(mode):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{what} {str(path)!r} cannot be read: {reason}; {remedy}") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise UsageError(f"{what} {str(path)!r} is not a file but {kind}; {remedy}")
    return os.fdopen(descriptor, "rb")


def read_text(path: str | Path, what: str, remedy: str, most_bytes: int = MOST_BYTES) -> str:
    """Read a regular file of UTF-8 text of at most `most_bytes`. UsageError, with the line of an invalid byte.

    what: begins the error, remedy: ends it.
    """
    with open_regular(path, what, remedy) as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise UsageError(f"{what} {str(path)!r} cannot be read: {error.strerror}; {remedy}") from error
    if len(data) > most_bytes:
        raise UsageError(f"{what} {str(path)!r} has over {most_bytes} bytes, more than any such file; {remedy}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{what} {str(path)!r}, line {line}: is not UTF-8 text: {error.reason}; {remedy}") from error


def parse_json(text: str | bytes, where: str, remedy: str, *, strict: bool = True) -> Any:
    """Parse JSON text. UsageError, with line and column where known, for anything else.

    Not allowed: values nested deeper than Python's stack, and integers of over 4300 digits. strict: nor a name twice
    in one object, which other libraries write.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if strict else None)
    except RecursionError as error:
        raise UsageError(f"{where} is not JSON: it is nested too deeply; {remedy}") from error
    except ValueError as error:  # of the decoder, with line and column; of a byte; of an integer that is too long
        raise UsageError(f"{where} is not JSON: {error}; {remedy}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        known: set[str] = set()
        for name, _ in pairs:
            if name in known:
                raise ValueError(f"{short(name)} is given twice in one object")
            known.add(name)
    return found


def read_json(path: str | Path, what: str, remedy: str, most_bytes: int = MOST_BYTES, *, strict: bool = True) -> Any:
    """Read a JSON file; see `read_text` and `parse_json`."""
    return parse_json(read_text(path, what, remedy, most_bytes), f"{what} {str(path)!r}", remedy, strict=strict)


def read_lines(path: str | Path, what: str, remedy: str) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines of a regular file, with their numbers from 1. UsageError for a line over 16 MiB."""
    with open_regular(path, what, remedy) as file:
        for number in itertools.count(1):
            try:
                line = file.readline(_LONGEST_LINE)
            except OSError as error:
                raise UsageError(f"{what} {str(path)!r} cannot be read: {error.strerror}; {remedy}") from error
            if not line:
                return
            if len(line) == _LONGEST_LINE:
                raise UsageError(f"{what} {str(path)!r}, line {number} has over {_LONGEST_LINE} bytes; {remedy}")
            yield number, line


def write_text(path: str | Path, text: str, what: str) -> None:
    """Write a file whole or not at all; a device is written directly. UsageError, e.g. for a full disk.

    what: begins the error.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target.resolve(), text)
    except OSError as error:
        raise unwritable(what, path, error) from error


def unwritable(what: str, path: str | Path, error: OSError) -> UsageError:
    """UsageError that says why a file could not be written, e.g. on a full disk."""
    return UsageError(f"{what} {str(path)!r} cannot be written: {error.strerror or error}; give another path")


def _replace(target: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)  # mkstemp makes files that only the owner can read
        os.umask(mask)
        os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
