"""Clock of a device: host time on the CPU, events in the stream of an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from oases.core.execution.executor import mark, seconds_between

HELD = 1.5
"""Time that an accelerator is held, in times that the host took to queue the same work before."""
HIGHEST_CLOCK = 3e9
"""Cycles per second, above the rated boost clocks of NVIDIA's accelerators (up to 2.6e9)."""


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, from an idle device to the end of what it queues there."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


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
        """Current time, see `mark`."""
        return mark(self.device)

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks, after waiting for the later one; negative where `end` came first."""
        return seconds_between(start, end)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        synchronize(self.device)
