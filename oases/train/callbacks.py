"""What surrounds the steps of a run: its log, its checkpoints, and the signal that ends it."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from oases.errors import SavedExit
from oases.execution.group import group_rank
from oases.parallel.collectives import all_reduce
from oases.train.checkpoint.coordination import SaveError
from oases.train.checkpoint.files import cpu_state
from oases.train.checkpoint.writer import CheckpointWriter
from oases.train.logs import Scalars, StepLog
from oases.train.metrics import StepReport

if TYPE_CHECKING:
    from oases.train.trainer import Trainer


class TrainingCallbacks:
    """Called after every step of `trainer.train`, by all ranks; a context, for what is open meanwhile.

    With a checkpoint folder it saves every so many steps and after the last, and at SIGTERM: then it finishes the
    step, saves, and raises SavedExit. One small collective a step keeps the ranks to one decision.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.first = group_rank(trainer.group) == 0
        self.stall_seconds = 0.0
        """What checkpoints cost the steps: the copies, and waiting for the one before."""
        self.failed: list[str] = []
        """Checkpoints that could not be written, and why."""
        self._saved_step = trainer.steps_done if trainer.resumed else -1
        self._open = ExitStack()

    def __enter__(self) -> TrainingCallbacks:
        config = self.trainer.config
        self._writer: CheckpointWriter | None = None
        self._log: StepLog | None = None
        self._scalars: Scalars | None = None
        self._told = lambda: False
        if config.step_log is not None and self.first:
            self._log = self._open.enter_context(StepLog(config.step_log, self.trainer.steps_done))
        if config.tensorboard is not None and self.first:
            self._scalars = self._open.enter_context(Scalars(config.tensorboard, self.trainer.steps_done))
        if config.checkpoint is not None:
            self._writer = self._open.enter_context(
                CheckpointWriter(config.checkpoint, config.keep, self.trainer.group)
            )
            self._told = self._open.enter_context(defer_sigterm())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def after_step(self, report: StepReport | None) -> None:
        """Log the step, and save where it is time. report: of the step, None where nobody asked for one.

        Raises SavedExit once the process was told to end, SaveError where the policy is to stop at it.
        """
        config, step = self.trainer.config, self.trainer.steps_done
        told, failed = self._agreed()
        # Before the checkpoint starts: the log of a run that goes on from it must have the step.
        self._write(report)
        if failed:
            self._settle()
        if self._writer is not None and (told or (config.checkpoint_every and step % config.checkpoint_every == 0)):
            self._start()
        if told:
            self.finish()
            raise SavedExit(f"ended by SIGTERM after step {step}, which is saved in {config.checkpoint!r}")

    def finish(self) -> None:
        """Save the last step, unless it is, and wait until it is whole. SaveError if it could not be written."""
        if self._writer is None:
            return
        if self._saved_step != self.trainer.steps_done:
            self._start()
        self._writer.wait()

    def summary(self) -> dict[str, Any]:
        """What checkpoints were written and what they cost, for the report of a run."""
        writer = self._writer
        return {
            "saved": 0 if writer is None else writer.saved,
            "failed": self.failed,
            "stall_seconds": self.stall_seconds,
            "write_seconds": 0.0 if writer is None else writer.write_seconds,
        }

    def _agreed(self) -> tuple[bool, bool]:
        """(whether any rank was told to end, whether any knows of a checkpoint that failed)."""
        if self._writer is None:
            return False, False
        flags = torch.tensor([float(self._told()), float(self._writer.failed())], device=self.trainer.device)
        told, failed = all_reduce(flags, self.trainer.group, "told to end", largest=True).tolist()
        return bool(told), bool(failed)

    def _start(self) -> None:
        assert self._writer is not None
        start = time.perf_counter()
        if self._scalars is not None:
            self._scalars.flush()
        self._settle()  # before the copies: two of them at a time would need twice the memory
        trainer = self.trainer
        trainer.settle()
        self._writer.start(cpu_state(trainer.model, trainer.optimizer, trainer.group), trainer.checkpoint_metadata())
        self._saved_step = trainer.steps_done
        self.stall_seconds += time.perf_counter() - start

    def _settle(self) -> None:
        """Wait for the checkpoint under way, and deal with its failure as the policy says."""
        assert self._writer is not None
        try:
            self._writer.wait()
        except SaveError as error:
            if self.trainer.config.save_error == "stop":
                raise
            self.failed.append(str(error))
            if self.first:
                warnings.warn(f"{error}; training goes on", stacklevel=2)

    def _write(self, report: StepReport | None) -> None:
        if report is None:
            return
        values = report.values() | {"stall_seconds": self.stall_seconds}
        for log in (self._log, self._scalars):
            if log is not None:
                log.write(**values)


@contextmanager
def defer_sigterm() -> Iterator[Callable[[], bool]]:
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
