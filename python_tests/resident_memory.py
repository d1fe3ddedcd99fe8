"""Memory of this process in bytes, as Linux counts it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def resident() -> int:
    """Return what is resident now."""
    return _bytes_of("VmRSS")


def peak() -> int:
    """Return the most that was resident since the last `reset_peak`."""
    return _bytes_of("VmHWM")


def reset_peak() -> None:
    """Start the peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def limited_memory(megabytes: int) -> Iterator[None]:
    """Let this process allocate up to so much more; MemoryError beyond."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_bytes_of("VmData") + megabytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _bytes_of(key: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024
