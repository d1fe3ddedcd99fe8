"""Callbacks after every training step: logs, checkpoints, and SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from oases.checkpoint.metadata import Metadata
from oases.checkpoint.state import State
from oases.checkpoint.writer import CheckpointWriter, SaveError
from oases.core.execution.group import ProcessGroup, group_rank
from oases.distributed.collectives import all_reduce
from oases.errors import SavedExit
from oases_train.config import TrainConfig
from oases_train.logs import Scalars, StepLog
from oases_train.metrics import StepReport


class TrainingCallbacks:
    """Logging and checkpointing of a run: a context manager; `after_step` is a collective over all ranks.

    With a checkpoint folder it saves at the configured interval and after the last step. On SIGTERM it finishes the
    step, saves, and raises SavedExit. One small all-reduce per step makes the ranks decide alike.

    group: all ranks. device: of the model. steps_done: before the first call. saved: whether these are in a
    checkpoint. state: what a checkpoint of the current state holds.
    """

    def __init__(
        self,
        config: TrainConfig,
        group: ProcessGroup | None,
        device: torch.device,
        steps_done: int,
        *,
        saved: bool,
        state: Callable[[], tuple[State, Metadata]],
    ) -> None:
        self.config, self.group, self.device, self.state = config, group, device, state
        self.first = group_rank(group) == 0
        self.stall_seconds = 0.0
        """Time that checkpoints delayed steps: copies to the CPU, and waiting for the previous checkpoint."""
        self.failed: list[str] = []
        """Errors of checkpoints that could not be written."""
        self._start_step, self._saved_step = steps_done, steps_done if saved else -1
        self._logs: list[StepLog | Scalars] = []
        self._writer: CheckpointWriter | None = None
        self._terminating: Callable[[], bool] = lambda: False
        self._open = ExitStack()

    def __enter__(self) -> TrainingCallbacks:
        config, steps = self.config, self._start_step
        if config.step_log is not None and self.first:
            self._logs.append(self._open.enter_context(StepLog(config.step_log, steps)))
        if config.tensorboard is not None and self.first:
            self._logs.append(self._open.enter_context(Scalars(config.tensorboard, steps)))
        if config.checkpoint is not None:
            self._writer = self._open.enter_context(CheckpointWriter(config.checkpoint, config.keep, self.group))
            self._terminating = self._open.enter_context(defer_sigterm())
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)

    def after_step(self, step: int, report: StepReport | None) -> None:
        """Log step number `step`, counted from 1, and save a checkpoint if one is due.

        report: of the step; None if no rank wants one. Raises SavedExit after SIGTERM.
        """
        terminating, failed = self._all_reduce_flags()
        # Before the checkpoint: the log of a run resumed from it must contain the step.
        if report is not None:
            for log in self._logs:
                log.write(**report.values() | {"stall_seconds": self.stall_seconds})
        if failed:
            self._wait()
        every = self.config.checkpoint_every
        if self._writer is not None and (terminating or (every and step % every == 0)):
            self._start(step)
        if terminating:
            self.finish(step)
            raise SavedExit(f"ended by SIGTERM after step {step}, which is saved in {self.config.checkpoint!r}")

    def finish(self, step: int) -> None:
        """Save the last step, unless saved, and wait for the write. SaveError if it failed."""
        if self._writer is None:
            return
        if self._saved_step != step:
            self._start(step)
        self._writer.wait()

    def summary(self) -> dict[str, Any]:
        """Number of checkpoints written, failures and seconds, for the result of a run."""
        writer = self._writer
        return {
            "saved": 0 if writer is None else writer.saved,
            "failed": self.failed,
            "stall_seconds": self.stall_seconds,
            "write_seconds": 0.0 if writer is None else writer.write_seconds,
        }

    def _all_reduce_flags(self) -> tuple[bool, bool]:
        """All-reduce (a rank received SIGTERM, a rank's checkpoint failed)."""
        if self._writer is None:
            return False, False
        flags = torch.tensor([float(self._terminating()), float(self._writer.failed())], device=self.device)
        terminating, failed = all_reduce(flags, self.group, "termination", largest=True).tolist()
        return bool(terminating), bool(failed)

    def _start(self, step: int) -> None:
        assert self._writer is not None
        start = time.perf_counter()
        for log in self._logs:
            log.sync()  # a run that resumes here appends to it
        self._wait()  # before the copies: two at a time would need twice the memory
        self._writer.start(*self.state())
        self._saved_step = step
        self.stall_seconds += time.perf_counter() - start

    def _wait(self) -> None:
        """Wait for the pending checkpoint, and warn where it could not be written."""
        assert self._writer is not None
        try:
            self._writer.wait()
        except SaveError as error:
            self.failed.append(str(error))
            if self.first:
                warnings.warn(f"{error}; training continues", stacklevel=2)


@contextmanager
def defer_sigterm() -> Iterator[Callable[[], bool]]:
    """Handle SIGTERM by setting a flag; yields a function that returns the flag.

    Only the main thread can set handlers; in other threads SIGTERM keeps its handler and the flag stays False.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
