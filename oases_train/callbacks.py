"""Callbacks after every training step: logs, checkpoints, and SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from oases.checkpoint.state import state
from oases.checkpoint.writer import CheckpointWriter, SaveError
from oases.core.execution.group import group_rank
from oases.distributed.collectives import all_reduce
from oases.errors import SavedExit
from oases_train.logs import Scalars, StepLog
from oases_train.metrics import StepReport, Training


class TrainingCallbacks:
    """Logging and checkpointing in `trainer.train`: a context manager; `after_step` is a collective over all ranks.

    With a checkpoint folder it saves at the configured interval and after the last step. On SIGTERM it finishes the
    step, saves, and raises SavedExit. One small all-reduce per step makes the ranks decide alike.
    """

    def __init__(self, trainer: Training) -> None:
        self.trainer = trainer
        self.first = group_rank(trainer.group) == 0
        self.stall_seconds = 0.0
        """Time that checkpoints delayed steps: copies to the CPU, and waiting for the previous checkpoint."""
        self.failed: list[str] = []
        """Errors of checkpoints that could not be written."""
        self._saved_step = trainer.steps_done if trainer.resumed else -1
        self._open = ExitStack()

    def __enter__(self) -> TrainingCallbacks:
        config = self.trainer.config
        self._writer: CheckpointWriter | None = None
        self._log: StepLog | None = None
        self._scalars: Scalars | None = None
        self._terminating = lambda: False
        if config.step_log is not None and self.first:
            self._log = self._open.enter_context(StepLog(config.step_log, self.trainer.steps_done))
        if config.tensorboard is not None and self.first:
            self._scalars = self._open.enter_context(Scalars(config.tensorboard, self.trainer.steps_done))
        if config.checkpoint is not None:
            self._open.callback(self.trainer.unlock)
            self._writer = self._open.enter_context(
                CheckpointWriter(config.checkpoint, config.keep, self.trainer.group)
            )
            self._terminating = self._open.enter_context(defer_sigterm())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def after_step(self, report: StepReport | None) -> None:
        """Log the step and save a checkpoint if one is due. report: of the step; None if no rank wants one.

        Raises SavedExit after SIGTERM.
        """
        config, step = self.trainer.config, self.trainer.steps_done
        terminating, failed = self._all_reduce_flags()
        # Before the checkpoint: the log of a run resumed from it must contain the step.
        self._write(report)
        if failed:
            self._wait()
        due = config.checkpoint_every and step % config.checkpoint_every == 0
        if self._writer is not None and (terminating or due):
            self._start()
        if terminating:
            self.finish()
            raise SavedExit(f"ended by SIGTERM after step {step}, which is saved in {config.checkpoint!r}")

    def finish(self) -> None:
        """Save the last step, unless saved, and wait for the write. SaveError if it failed."""
        if self._writer is None:
            return
        if self._saved_step != self.trainer.steps_done:
            self._start()
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
        flags = torch.tensor([float(self._terminating()), float(self._writer.failed())], device=self.trainer.device)
        terminating, failed = all_reduce(flags, self.trainer.group, "termination", largest=True).tolist()
        return bool(terminating), bool(failed)

    def _start(self) -> None:
        assert self._writer is not None
        start = time.perf_counter()
        if self._log is not None:
            self._log.sync()  # a run that resumes here appends to it
        if self._scalars is not None:
            self._scalars.flush()
        self._wait()  # before the copies: two at a time would need twice the memory
        trainer = self.trainer
        trainer.settle()
        self._writer.start(state(trainer.model, trainer.optimizer, trainer.group), trainer.checkpoint_metadata())
        self._saved_step = trainer.steps_done
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

    def _write(self, report: StepReport | None) -> None:
        if report is None:
            return
        values = report.values() | {"stall_seconds": self.stall_seconds}
        for log in (self._log, self._scalars):
            if log is not None:
                log.write(**values)


@contextmanager
def defer_sigterm() -> Iterator[Callable[[], bool]]:
    """Handle SIGTERM by setting a flag; yields a function that returns the flag.

    Only the main thread can set handlers; in other threads SIGTERM keeps its handler and the flag stays False.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def handle(number: int, frame: Any) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
