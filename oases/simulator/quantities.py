"""Formatting of seconds, bytes, rates and counts with about three digits and a suitable unit."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits and a suitable unit."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def bytes_text(num_bytes: float) -> str:
    """Format bytes in GiB, or MiB for small amounts."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def rate_text(number: float) -> str:
    """Format a rate with about three digits, e.g. 1.23 M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 10 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def count_text(count: int) -> str:
    """Format a large count, such as a model's parameters."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.3g} million"
