"""Allocator of a benchmark: memory that is freed stays with the process, or goes back to the system as by default.

Contestants that allocate a whole batch's activations otherwise pay tens of thousands of page faults a step.
"""

from __future__ import annotations

import ctypes

from oases.errors import UsageError

MALLOCS = ("keep", "trim")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt, by malloc.h."""
_PAD_BYTES = 64 << 20


def set_malloc(name: str) -> None:
    """Set the allocator of this process for good. keep: nothing is mapped or trimmed; trim: glibc as it is.

    UsageError where the C library is not glibc.
    """
    if name == "trim":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    values = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: _PAD_BYTES}
    if mallopt is None or not all(mallopt(parameter, value) for parameter, value in values.items()):
        raise UsageError(f"--malloc {name} needs glibc, which this process does not run on; give --malloc trim")
