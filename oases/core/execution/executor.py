"""Executor of schedules: starts, waits for or runs every op of a list.

It is independent of layers and models. The caller passes a handler for each `Step.key`; labels, spans, the clock and
failures are handled here.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakMethod, ref

from oases.core.execution.failure import (
    NO_PASS,
    FailedRankError,
    Failure,
    FailureMonitor,
    error_of,
    lost_a_rank,
)
from oases.core.execution.propagation import watch_backward
from oases.core.schedule import Op, Schedule
from oases.core.schedule.ops import STARTS
from oases.errors import UsageError

Place = tuple[int, int]
"""(block, sub-batch)."""


WHOLE_BATCH = ", whole batch"
"""Suffix of a stack's label for batches too small for its sub-batches, which run unsplit."""
AT_ONCE = ", nothing under it"
"""End of the place in a label of a collective that is waited for before any compute runs."""


class Step:
    """Op of a schedule with derived constants: its handler's key, its place, its collective's label.

    key: the op without its place, "F", "all_reduce F" or "wait F". carried: (kind, block, sub-batch) of the op whose
    result a collective or wait transfers.
    """

    __slots__ = ("block", "carried", "is_start", "key", "label", "op", "place", "sub_batch", "text")

    def __init__(self, op: Op, label: str) -> None:
        self.op, self.text, self.label = op, str(op), label
        self.block, self.sub_batch = self.place = (op.block, op.sub_batch)
        self.key: str = op.kind if op.of is None else f"{op.kind} {op.of}"
        self.carried = (op.of, op.block, op.sub_batch)
        self.is_start = op.kind in STARTS


class Program(ABC):
    """Steps of a schedule for one stack, compiled once and run in every call.

    label: name of the stack in errors and statistics. layer_of: layer of each block, for the statistics; None where a
    layer is two blocks.
    """

    def __init__(self, schedule: Schedule, label: str, layer_of: Sequence[int] | None = None) -> None:
        self.schedule, self.label, self._layer_of = schedule, label, layer_of
        lines = schedule.lines
        steps: dict[Op, Step] = {}
        for op in schedule:
            layer = "" if layer_of is None else f"layer {layer_of[op.block]}, "
            place = f"{label}, {layer}line {lines[op]} of {schedule.name}{AT_ONCE * (op in schedule.exposed)}"
            named = op.kind if op.of is None else op.carried
            steps[op] = Step(op, f"{named} ({place})")
        self.forward = tuple(steps[op] for op in schedule.forward)
        self.backward = tuple(steps[op] for op in schedule.backward)
        again = {kind for kind, *_ in schedule.recomputed}
        self.read_again = sorted({block for op in schedule.backward if op.kind in again for block in self.reads(op)})
        """Blocks whose parameters a recomputation reads."""
        self.ends = self.ends_of(self.backward)

    def layer(self, block: int) -> int:
        """Layer of a block, for statistics."""
        return block // 2 if self._layer_of is None else self._layer_of[block]

    @abstractmethod
    def makes_gradients(self, op: Op) -> Iterable[int]:
        """Blocks whose gradients an op contributes to."""

    @abstractmethod
    def reads(self, op: Op) -> Iterable[int]:
        """Blocks whose parameters an op reads."""

    def ends_of(self, backward: Sequence[Step]) -> list[int]:
        """For each block, the step of a backward pass after which its gradients are complete and the next collective
        started.
        """
        ends = [0] * self.schedule.num_blocks
        for number, step in enumerate(backward, start=1):
            for block in self.makes_gradients(step.op):
                ends[block] = number
        return [end + (0 < end < len(backward) and backward[end].is_start) for end in ends]


Handlers = Mapping[str, Callable[[Step], None]]
"""Implementation of each op, by `Step.key`."""


class StackHandle(Protocol):
    """Call of a stack whose backward pass a pipeline can split."""

    def recompute(self) -> None:
        """Recompute now, before the gradient arrives; the backward pass then skips it."""

    def defer_weights(self) -> None:
        """Before the backward pass: have it skip the weight gradients of its W ops."""

    def compute_weights(self) -> None:
        """After such a backward pass: accumulate the weight gradients into the parameters."""


class StackHandles:
    """Handles of stack calls, by which a pipeline recomputes early or defers weight gradients.

    They are weak references, valid as long as the calls' graphs, so this keeps no tensor alive, except deferred
    weight gradients until they are computed. All ranks of the stacks' groups must do the same at the same point.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], StackHandle | None]] = []
        self._waiting: list[StackHandle] = []

    def add(self, call: StackHandle) -> None:
        """Add a call, in the order of the forward pass."""
        self._calls.append(ref(call))

    def recompute(self) -> None:
        """Recompute now, with its collectives. A second call does nothing."""
        for call in self._backwards():
            call.recompute()

    def defer_weights(self) -> None:
        """Before the backward pass: have it skip the weight gradients of its W ops."""
        self._waiting = self._backwards()
        for call in self._waiting:
            call.defer_weights()

    def compute_weights(self) -> None:
        """After such a backward pass: accumulate the weight gradients into the parameters."""
        for call in self._waiting:
            call.compute_weights()
        self._waiting = []

    def _backwards(self) -> list[StackHandle]:
        return [call for held in reversed(self._calls) if (call := held()) is not None]


@dataclass
class Context:
    """Caller's options of one stack call.

    spans: list to append (op, start, end) of every compute op and wait to, with times from `clock`, which records an
    event on an accelerator. handles: receives the call's handle, for a pipeline that splits its passes; nothing where
    it runs without gradients.
    """

    spans: list[tuple[str, Any, Any]] | None = None
    clock: Callable[[], Any] = time.perf_counter
    handles: StackHandles = field(default_factory=StackHandles)


class FailureScope:
    """Context around the ops of one stack call: an exception is raised on every rank, with the op's place.

    monitor: None for a group of one, where only out-of-memory errors get their place. forget: releases the call's
    tensors. unanimous: exception types that all ranks raise by themselves. A UsageError keeps its type on the rank
    that raises it.
    """

    def __init__(
        self, schedule: Schedule, label: str, monitor: FailureMonitor | None, forget: Callable[[], None],
        unanimous: tuple[type[Exception], ...] = (),
    ) -> None:  # fmt: skip
        self.current_op: Op | str = "the start of the call"
        """The op that runs now, set by the executor."""
        self._schedule = schedule
        self._label = label
        self._monitor = monitor
        self._unanimous = unanimous
        self._forget_weakly = WeakMethod(
            forget
        )  # a strong reference would be a cycle, which keeps tensors until a garbage collection
        self._failures = 0

    def __enter__(self) -> None:
        self._failures = self._monitor.scheduler.failures if self._monitor is not None else 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        monitor = self._monitor
        self.unwatch_backward()
        if isinstance(error, FailedRankError):
            return
        if monitor is not None and monitor.scheduler.failures != self._failures:  # the scheduler stopped this rank
            self._forget()
            raise monitor.error() from error
        if lost_a_rank(error):
            return  # not a failure of an op
        if isinstance(error, self._unanimous):
            self._forget()
            return
        failure = self._described(error, monitor.rank if monitor is not None else 0)
        if monitor is None and not failure.out_of_memory:
            return  # no other rank to notify: keep the block's own error
        self._forget()
        if failure.out_of_memory:
            traceback.clear_frames(trace)  # frames hold tensors, too
        broken = monitor.fail(failure) if monitor is not None else ""
        if isinstance(error, UsageError) or not isinstance(error, Exception):
            return  # an interrupt or exit keeps its type here, too
        raise error_of(failure, broken, monitor.size if monitor is not None else 1) from error

    def watch_backward(self) -> None:
        """In a backward pass: if it ends by an exception outside of the call, such as a hook's, tell all ranks."""
        watch_backward(self._monitor, f"the backward pass around {self._label}")

    def unwatch_backward(self) -> None:
        """Tell nobody of an exception that comes now: it is told already, or all ranks raise it."""
        if self._monitor is not None:
            self._monitor.watched = NO_PASS

    def _forget(self) -> None:
        forget = self._forget_weakly()
        if forget is not None:
            forget()

    def _described(self, error: BaseException, rank: int) -> Failure:
        schedule, op = self._schedule, self.current_op
        where = f"{op} ({self._label}, schedule {schedule.name})"
        if isinstance(op, Op):
            line = f"line {schedule.lines[op]} of {schedule.name}"
            where = f"{op} ({self._label}, {line}: block {op.block}, sub-batch {op.sub_batch})"
        more = "" if schedule.recompute == "full" else "recompute='full', "
        remedy = f"; use {more}more than {schedule.num_sub_batches} sub_batches, or a smaller batch"
        return Failure.of(error, rank, where, remedy)


class Executor:
    """Runs the steps of one call by its handlers."""

    def __init__(self, handlers: Handlers, guard: FailureScope, context: Context) -> None:
        self._handlers, self.guard, self._context = handlers, guard, context

    def run(self, steps: Iterable[Step]) -> None:
        """Run the steps in order; `guard.current_op` is the op that runs."""
        handlers, guard, spans = self._handlers, self.guard, self._context.spans
        if spans is None:
            for step in steps:
                guard.current_op = step.op
                handlers[step.key](step)
            return
        clock = self._context.clock
        for step in steps:
            guard.current_op = step.op
            if step.is_start:
                handlers[step.key](step)
                continue
            start = clock()
            handlers[step.key](step)
            spans.append((step.text, start, clock()))
