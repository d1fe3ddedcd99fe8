"""Processes found by a mark in their environment, which all that they start inherits."""

import time
from pathlib import Path


def with_mark(mark):
    """The processes that have inherited a mark in their environment, by command line."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found


def wait_until_gone(mark):
    end = time.monotonic() + 240
    while with_mark(mark):
        assert time.monotonic() < end, with_mark(mark)
        time.sleep(0.1)
