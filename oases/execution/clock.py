"""Times work where it is done: on the CPU by its clock, on an accelerator by events in its stream.

What is measured by events has not run on a GPU yet.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks in time on one device. On an accelerator marks are events, and reading them waits for the later one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = device.type == "cuda"

    def mark(self) -> Any:
        """Now: seconds of the monotonic clock, or an event behind what is queued on the current stream."""
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; negative where `end` came first."""
        if not self._events:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1e3)

    def synchronize(self) -> None:
        """Return when all that was queued has been done."""
        synchronize(self.device)


def synchronize(device: torch.device) -> None:
    """Return when the work queued on `device` is done; at once on the CPU, which queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
