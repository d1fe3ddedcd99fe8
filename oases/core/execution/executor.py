"""Executor of schedules: starts, waits for or runs every op of a list.

It is independent of layers and models. The caller passes a handler for each `Step.key`; labels, spans and the clock
are handled here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from oases.core.schedule import Op, Schedule
from oases.core.schedule.ops import STARTS

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


class StackHandles:
    """Stack calls, as `ScheduledCall` has them, by which a pipeline recomputes early or defers weight gradients.

    They are weak references, valid as long as the calls' graphs, so this keeps no tensor alive, except deferred
    weight gradients until they are computed. All ranks of the stacks' groups must do the same at the same point.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._waiting: list[Any] = []

    def add(self, call: Any) -> None:
        """Add a call, in the order of the forward pass."""
        self._calls.append(ref(call))

    def recompute(self) -> None:
        """Recompute now, with its collectives, before the gradient arrives. A second call does nothing."""
        for call in self._backwards():
            call.recompute()

    def defer_weights(self) -> None:
        """Before the backward pass: have it skip the weight gradients of its W ops."""
        self._waiting = self._backwards()
        for call in self._waiting:
            call.defer_weights()

    def compute_weights(self) -> None:
        """After such a backward pass: accumulate the weight gradients into the parameters."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.compute_weights()

    def _backwards(self) -> list[Any]:
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


def mark(device: torch.device) -> Any:
    """Current time: seconds of the monotonic clock, or an event recorded on an accelerator's current stream."""
    if device.type in ("cpu", "meta"):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(*marks: Any, per: int = 1) -> float:
    """Seconds between marks, in pairs, divided by `per`; waits for the last one of an accelerator."""
    pairs, on_host = zip(marks[::2], marks[1::2], strict=True), isinstance(marks[-1], float)
    if not on_host:
        marks[-1].synchronize()
    return float(sum(end - start if on_host else start.elapsed_time(end) / 1e3 for start, end in pairs)) / per


class Executor:
    """Runs the steps of one call by its handlers.

    label: of the stack or stage. current_op: the op that runs now, or what else the call is about.
    """

    def __init__(self, handlers: Handlers, schedule: Schedule, label: str, context: Context) -> None:
        self.current_op: Op | str = "the start of the call"
        self._handlers, self._schedule, self._label, self._context = handlers, schedule, label, context

    @property
    def remedy(self) -> str:
        """Remedy for a lack of memory."""
        more = "" if self._schedule.recompute == "full" else "recompute='full', "
        return f"; use {more}more than {self._schedule.num_sub_batches} sub_batches, or a smaller batch"

    def place(self) -> str:
        """Describe the place that was reached, for errors."""
        schedule, op = self._schedule, self.current_op
        if not isinstance(op, Op):
            return f"{op} ({self._label}, schedule {schedule.name})"
        line = f"line {schedule.lines[op]} of {schedule.name}"
        return f"{op} ({self._label}, {line}: block {op.block}, sub-batch {op.sub_batch})"

    def run(self, steps: Iterable[Step]) -> None:
        """Run the steps in order."""
        handlers, spans = self._handlers, self._context.spans
        if spans is None:
            for step in steps:
                self.current_op = step.op
                handlers[step.key](step)
            return
        clock = self._context.clock
        for step in steps:
            self.current_op = step.op
            if step.is_start:
                handlers[step.key](step)
                continue
            start = clock()
            handlers[step.key](step)
            spans.append((step.text, start, clock()))
