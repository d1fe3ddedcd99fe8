"""Clock of a device: host time on the CPU, events in the stream of an accelerator."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Time marks on one device. On an accelerator marks are events; reading them waits for the later one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = device.type not in ("cpu", "meta")

    def mark(self) -> Any:
        """Current time: seconds of the monotonic clock, or an event recorded on the current stream."""
        if not self._events:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks; negative where `end` came first."""
        if not self._events:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1e3)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        synchronize(self.device)


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
