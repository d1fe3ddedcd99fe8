"""The executor of schedules: for every op of a list start, wait, or run.

It knows neither a layer nor a model. The caller gives the work of each op, a handler by the op's `Step.key`; labels,
spans, the clock and failures are dealt with here, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oases.execution.calls import Calls
from oases.execution.failure import Guard
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


class Program:
    """The steps of a schedule for one stack: made once, run in every call.

    label: of the stack, in errors and statistics. layer_of: each block's layer, for the statistics; None where a
    layer is two blocks.
    """

    def __init__(self, schedule: Schedule, label: str, layer_of: Sequence[int] | None = None) -> None:
        self.schedule, self.label = schedule, label
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

    def makes_gradients(self, op: Op) -> Iterable[int]:
        """The blocks of whose gradients an op makes some."""
        raise NotImplementedError

    def reads(self, op: Op) -> Iterable[int]:
        """The blocks whose parameters an op reads."""
        raise NotImplementedError

    def ends_of(self, backward: Sequence[Step]) -> list[int]:
        """By block, where in a backward pass its gradients are whole, the collective that follows started."""
        ends = [0] * self.schedule.num_blocks
        for number, step in enumerate(backward, start=1):
            for block in self.makes_gradients(step.op):
                ends[block] = number
        return [end + (0 < end < len(backward) and backward[end].is_start) for end in ends]


Handlers = Mapping[str, Callable[[Step], None]]
"""What each op does, by `Step.key`."""


@dataclass
class Context:
    """One call's surroundings, which its stack cannot know.

    spans: list to append (op, start, end) of every compute op and wait to, in what `clock` gives; on an accelerator,
    which works behind the host, one that records an event. calls: takes the call, for a pipeline that splits its
    passes; none where it is made without gradients.
    """

    spans: list[tuple[str, Any, Any]] | None = None
    clock: Callable[[], Any] = time.perf_counter
    calls: Calls = field(default_factory=Calls)


class Executor:
    """Runs the steps of one call by its handlers."""

    def __init__(self, handlers: Handlers, guard: Guard, context: Context) -> None:
        self._handlers, self.guard, self._context = handlers, guard, context

    def run(self, steps: Iterable[Step]) -> None:
        """Run these, in their order. The guard is told what is under way."""
        handlers, guard, spans = self._handlers, self.guard, self._context.spans
        if spans is None:
            for step in steps:
                guard.doing = step.op
                handlers[step.key](step)
            return
        clock = self._context.clock
        for step in steps:
            guard.doing = step.op
            if step.is_start:
                handlers[step.key](step)
                continue
            start = clock()
            handlers[step.key](step)
            spans.append((step.text, start, clock()))
