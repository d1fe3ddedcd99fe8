"""A step that fails on one rank fails on all: in every group that the rank is in, its peers are told.

Inside a stack's schedule the stack does so in its own group (`oases.execution.failure`). But a step is more than its
stacks, and a run of a plan has more groups: whoever waits in one of them for the rank that failed must hear of it,
and whoever hears of it tells its own groups in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType

import torch

from oases.execution.failure import Failure, Watch, is_out_of_memory, lost_a_rank, watch_of
from oases.execution.group import ProcessGroup, group_size, scheduler_of
from oases.train.checkpoint.coordination import SaveError
from oases.train.step_check import LossError

_ON_ALL = (LossError, SaveError)
"""Raised by decisions that all ranks take together."""
_PATIENCE_SECONDS = 3.0
"""Until the word of a rank that failed has come, where it closed what this rank waited for."""


class FailureNotifier:
    """A context around what all ranks of a run do together; it can be entered again inside. All ranks make it.

    groups: those of this rank, that of all ranks first. device: where its tensors are. What is raised inside goes on;
    then every other rank raises an error, too, that names the first one, unless it ended without a word.
    """

    def __init__(self, groups: Iterable[ProcessGroup | None], device: torch.device) -> None:
        together = [group for group in groups if group is not None and group_size(group) > 1]
        self._watches = [watch_of(group, scheduler_of(group), device) for group in together]
        self._entered: list[list[int]] = []
        self.activity = ""
        """What errors say was being done."""
        self.failed = False
        """Whether something failed here or elsewhere since this was made."""

    def __enter__(self) -> FailureNotifier:
        self._entered.append([watch.scheduler.failures for watch in self._watches])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = self._entered.pop()
        if not isinstance(error, Exception) or isinstance(error, _ON_ALL) or not self._watches:
            return
        self.failed = True
        pairs = list(zip(self._watches, before, strict=True))
        told = any(watch.scheduler.failures != count for watch, count in pairs)
        if lost_a_rank(error) and not told and not self._heard(self._watches[0]):
            return  # a rank is gone; its peers notice that themselves, and it would not answer
        first_line = (str(error).strip().splitlines() or [""])[0]
        silent = [watch for watch, count in pairs if watch.scheduler.failures == count]
        for watch in silent:  # all of them before it waits for any
            cause = f"{type(error).__name__}: {first_line}"
            watch.tell(Failure(watch.rank, self.activity, cause, "", is_out_of_memory(error)))
        for watch in silent:
            watch.scheduler.acknowledge()

    def _heard(self, watch: Watch) -> bool:
        """Whether a rank has said, or says soon, that it failed."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            try:
                watch.scheduler.check()
            except RuntimeError:
                return True
            time.sleep(0.05)
        return False
