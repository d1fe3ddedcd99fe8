"""SIGTERM while a run trains: it is noted, and the loop ends at a step's end instead of in its midst."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_noted() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM instead of ending at it; yields a function that tells whether it came.

    Only the main thread can do so; in another one the signal does what it did before.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: Any) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
