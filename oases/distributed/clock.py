"""Clock of a device: host time on the CPU, events in the stream of an accelerator."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import torch

from oases.core.execution.executor import synchronize

HELD = 1.5
"""Time that an accelerator is held, in times that the host took to queue the same work before."""
HIGHEST_CLOCK = 3e9
"""Cycles per second, above the rated boost clocks of NVIDIA's accelerators (up to 2.6e9)."""


class Clock:
    """Time marks on one device. On an accelerator marks are events; reading them waits for the later one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = device.type not in ("cpu", "meta")
        self._queueing: dict[Hashable, float] = {}
        self._began = 0.0

    @property
    def holds(self) -> bool:
        """Whether `hold` holds the device: one that its host may be slower than."""
        return self._events and hasattr(torch.get_device_module(self.device), "_sleep")

    def hold(self, of: Hashable) -> None:
        """Hold an accelerator until the host has queued what follows, up to `queued`.

        Marks then tell what the device needs. Otherwise one that is faster than its host waits for it between them.
        of: names the work, which is not held the first time, when it is not known how long the host takes; None for
        work that is not to be held.
        """
        if of is not None and self.holds and of in self._queueing:
            torch.get_device_module(self.device)._sleep(int(HELD * HIGHEST_CLOCK * self._queueing[of]))
        self._began = time.perf_counter()

    def queued(self, of: Hashable) -> None:
        """Note that the host has queued the work that `hold` named last.

        The least time counts: a host that waits for the device meanwhile takes as long as the device is held, too.
        """
        took = time.perf_counter() - self._began
        self._queueing[of] = min(took, self._queueing.get(of, took))

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
