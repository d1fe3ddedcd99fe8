"""Failure notification: an error on one rank raises on all ranks of every process group that the rank is in.

Inside a stack's schedule, `oases.core.execution.failure` notifies the stack's own group. A training step is more than
its stacks, and a plan has several groups: peers that wait for the failed rank in another group must be notified too,
and they in turn notify their own groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType

import torch

from oases.checkpoint.writer import SaveError
from oases.core.execution.failure import Failure, FailureMonitor, lost_a_rank, monitor_of
from oases.core.execution.group import ProcessGroup, group_size, scheduler_of
from oases_train.step_check import LossError

_RAISED_ON_ALL_RANKS = (LossError, SaveError)
"""Errors that follow from a collective decision: no peer needs a notification."""
_PATIENCE_SECONDS = 2.0
"""Wait for a failed rank's notification after it closed a connection that this rank was waiting on: several polls."""


class FailureNotifier:
    """Reentrant context manager around work that all ranks do together. A collective constructor.

    groups: process groups of this rank, the group of all ranks first. device: of their tensors. An error raised
    inside propagates; every other rank then raises an error that names the first one, unless the failed rank died
    without a notification.
    """

    def __init__(self, groups: Iterable[ProcessGroup | None], device: torch.device) -> None:
        together = [group for group in groups if group is not None and group_size(group) > 1]
        self._monitors = [monitor_of(group, scheduler_of(group), device) for group in together]
        self._failures_at_entry: list[list[int]] = []
        self.activity = ""
        """Current activity, for error messages, e.g. "step 3"."""
        self.failed = False
        """Whether anything failed on any rank since construction."""
        self._lost = False
        """Whether the error that propagates is known to come from a rank that died."""

    def __enter__(self) -> FailureNotifier:
        self._failures_at_entry.append([monitor.scheduler.failures for monitor in self._monitors])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = self._failures_at_entry.pop()
        lost, self._lost = self._lost, False
        if not isinstance(error, Exception) or isinstance(error, _RAISED_ON_ALL_RANKS) or not self._monitors:
            return
        self.failed = True
        pairs = list(zip(self._monitors, before, strict=True))
        notified = any(monitor.scheduler.failures != count for monitor, count in pairs)
        if lost_a_rank(error) and not notified and (lost or not self._receives_failure(self._monitors[0])):
            # A rank died; its peers see closed connections too, and it would never acknowledge.
            self._lost = bool(self._failures_at_entry)  # for the contexts around this one
            return
        pending = [monitor for monitor, count in pairs if monitor.scheduler.failures == count]
        # Report in all groups before acknowledging in any: a peer may be blocked in another of these groups.
        for monitor in pending:
            monitor.report_failure(Failure.of(error, monitor.rank, self.activity))
        for monitor in pending:
            monitor.scheduler.acknowledge()

    def _receives_failure(self, monitor: FailureMonitor) -> bool:
        """Whether a rank reports a failure within _PATIENCE_SECONDS."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            try:
                monitor.scheduler.check()
            except RuntimeError:
                return True
            time.sleep(0.05)
        return False
