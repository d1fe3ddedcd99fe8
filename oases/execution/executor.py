"""The executor of schedules: for every op of a list start, wait, or run.

It knows neither a layer nor a model. The caller gives the work of each op, a handler by the op's `Step.key`; labels,
spans, the clock and failures are dealt with here, once.
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

from oases.errors import UsageError
from oases.execution.failure import FailedRankError, Failure, FailureMonitor, error_of, is_out_of_memory, lost_a_rank
from oases.schedule import Op, Schedule
from oases.schedule.ops import STARTS

Place = tuple[int, int]
"""(block, sub-batch)."""


class Step:
    """One op of a list with what is derived from it once: key of its handler, place, label of its collective.

    key: the op without its place, "F", "all_reduce F" or "wait F". carried: (kind, block, sub-batch) of the op whose
    result a collective carries or a wait is for.
    """

    __slots__ = ("block", "carried", "is_start", "key", "label", "op", "place", "sub_batch", "text")

    def __init__(self, op: Op, label: str) -> None:
        self.op, self.text, self.label = op, str(op), label
        self.block, self.sub_batch = self.place = (op.block, op.sub_batch)
        self.key: str = op.kind if op.of is None else f"{op.kind} {op.of}"
        self.carried = (op.of, op.block, op.sub_batch)
        self.is_start = op.kind in STARTS


class Program(ABC):
    """The steps of a schedule for one stack: made once, run in every call.

    label: of the stack, in errors and statistics. layer_of: each block's layer, for the statistics; None where a
    layer is two blocks.
    """

    def __init__(self, schedule: Schedule, label: str, layer_of: Sequence[int] | None = None) -> None:
        self.schedule, self.label, self._layer_of = schedule, label, layer_of
        lines = schedule.lines
        steps: dict[Op, Step] = {}
        for op in schedule:
            layer = "" if layer_of is None else f"layer {layer_of[op.block]}, "
            place = f"{label}, {layer}line {lines[op]} of {schedule.name}"
            named = op.kind if op.of is None else op.carried
            steps[op] = Step(op, f"{named} ({place})")
        self.forward = tuple(steps[op] for op in schedule.forward)
        self.backward = tuple(steps[op] for op in schedule.backward)
        self.ends = self.ends_of(self.backward)

    def layer(self, block: int) -> int:
        """Layer of a block, for statistics."""
        return block // 2 if self._layer_of is None else self._layer_of[block]

    @abstractmethod
    def makes_gradients(self, op: Op) -> Iterable[int]:
        """The blocks of whose gradients an op makes some."""

    @abstractmethod
    def reads(self, op: Op) -> Iterable[int]:
        """The blocks whose parameters an op reads."""

    def ends_of(self, backward: Sequence[Step]) -> list[int]:
        """By block, where in a backward pass its gradients are whole, the collective that follows started."""
        ends = [0] * self.schedule.num_blocks
        for number, step in enumerate(backward, start=1):
            for block in self.makes_gradients(step.op):
                ends[block] = number
        return [end + (0 < end < len(backward) and backward[end].is_start) for end in ends]


Handlers = Mapping[str, Callable[[Step], None]]
"""The work of each op, by `Step.key`."""


class StackHandle(Protocol):
    """A call of a stack whose backward pass can be split."""

    def recompute(self) -> None:
        """Compute again now, before the gradient is there; the backward pass then leaves it out."""

    def defer_weights(self) -> None:
        """Before the backward pass: let it leave out the weight gradients that its W ops would compute."""

    def compute_weights(self) -> None:
        """After such a backward pass: add the weight gradients to those of the parameters."""


class StackHandles:
    """Handles of stack calls whose passes are split up: what they recompute, and their weight gradients.

    They are held weakly and live as long as their graphs, so this keeps no tensor; but for weight gradients that were
    deferred, which it keeps until they are computed. All ranks of the stacks' groups must do the same at the same
    point.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], StackHandle | None]] = []
        self._waiting: list[StackHandle] = []

    def add(self, call: StackHandle) -> None:
        """A call that was made, in the order of the forward pass."""
        self._calls.append(ref(call))

    def recompute(self) -> None:
        """Compute again now, with the collectives that this sends. A second time there is nothing left to do."""
        for call in self._backwards():
            call.recompute()

    def defer_weights(self) -> None:
        """Before the backward pass: let it leave out the weight gradients that its W ops would compute."""
        self._waiting = self._backwards()
        for call in self._waiting:
            call.defer_weights()

    def compute_weights(self) -> None:
        """After a backward pass that left them out: add the weight gradients to those of the parameters."""
        for call in self._waiting:
            call.compute_weights()
        self._waiting = []

    def _backwards(self) -> list[StackHandle]:
        return [call for held in reversed(self._calls) if (call := held()) is not None]


@dataclass
class Context:
    """One call's surroundings, which its stack cannot know.

    spans: list to append (op, start, end) of every compute op and wait to, in what `clock` gives; on an accelerator,
    which works behind the host, one that records an event. handles: receives the call's handle, for a pipeline that
    splits its passes; nothing where it runs without gradients.
    """

    spans: list[tuple[str, Any, Any]] | None = None
    clock: Callable[[], Any] = time.perf_counter
    handles: StackHandles = field(default_factory=StackHandles)


class FailureScope:
    """Around the ops of one call of a stack: what they raise is raised on every rank, with the op's place.

    monitor: None for a group of one, where only what runs out of memory is given its place. forget: lets go of the
    call's tensors, so that others can use their memory. unanimous: errors that all ranks raise by themselves. A
    UsageError stays what it is on the rank that raises it.
    """

    def __init__(
        self, schedule: Schedule, label: str, monitor: FailureMonitor | None, forget: Callable[[], None],
        unanimous: tuple[type[Exception], ...] = (),
    ) -> None:  # fmt: skip
        self.current_op: Op | str = "the start of the call"
        """The op under way; set by who runs it."""
        self._schedule = schedule
        self._label = label
        self._monitor = monitor
        self._unanimous = unanimous
        self._forget_weakly = WeakMethod(forget)  # strongly, the call would live until the garbage collector comes
        self._failures = 0

    def __enter__(self) -> None:
        self._failures = self._monitor.scheduler.failures if self._monitor is not None else 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, FailedRankError):
            return
        monitor = self._monitor
        if monitor is not None and monitor.scheduler.failures != self._failures:  # the scheduler stopped this rank
            self._forget()
            raise monitor.error() from error
        if lost_a_rank(error):
            return  # that is no op's failure
        if isinstance(error, self._unanimous):
            self._forget()
            return
        failure = self._described(error, monitor.rank if monitor is not None else 0)
        if monitor is None and not failure.out_of_memory:
            return  # nobody else to tell: the block's own error says it best
        self._forget()
        if failure.out_of_memory:
            traceback.clear_frames(trace)  # they hold tensors, too
        broken = monitor.fail(failure) if monitor is not None else ""
        if isinstance(error, UsageError):
            return
        raise error_of(failure, broken, monitor.size if monitor is not None else 1) from error

    def _forget(self) -> None:
        forget = self._forget_weakly()
        if forget is not None:
            forget()

    def _described(self, error: Exception, rank: int) -> Failure:
        schedule, op = self._schedule, self.current_op
        where = f"{op} ({self._label}, schedule {schedule.name})"
        if isinstance(op, Op):
            line = f"line {schedule.lines[op]} of {schedule.name}"
            where = f"{op} ({self._label}, {line}: block {op.block}, sub-batch {op.sub_batch})"
        out_of_memory = is_out_of_memory(error)
        remedy = ""
        if out_of_memory:
            more = "" if schedule.recompute == "full" else "recompute='full', "
            remedy = f"; use {more}more than {schedule.num_sub_batches} sub_batches, or a smaller batch"
        first_line = (str(error).strip().splitlines() or [""])[0]
        return Failure(rank, where, f"{type(error).__name__}: {first_line}", remedy, out_of_memory)


class Executor:
    """Runs the steps of one call by its handlers."""

    def __init__(self, handlers: Handlers, guard: FailureScope, context: Context) -> None:
        self._handlers, self.guard, self._context = handlers, guard, context

    def run(self, steps: Iterable[Step]) -> None:
        """Run these, in their order. The guard is told what is under way."""
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
