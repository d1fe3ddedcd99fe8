"""Pipeline parallelism: runs one rank's part of a pipeline schedule on micro-batches.

`_PipelineScheduleRuntime` of torch.distributed.pipelining is not used, for three reasons. Early recomputation is an
op of these schedules, and there a stage recomputes in its backward pass or not at all. It posts a receive where the
schedule has it, with both directions in one group, and all receives of a step together: a slow message then delays
one that has arrived. Here each lane receives ahead on its own. And its messages would not appear in `oases.report()`,
nor in the errors of a hanging rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from oases.core.execution.executor import Context, Executor, Place, StackHandles, Step
from oases.core.execution.failure import FailTogether, monitor_of
from oases.core.execution.piece import Piece
from oases.core.schedule import Schedule
from oases.distributed.messages import StageMessages

Forward = Callable[[int, int, Sequence[Tensor], Context], Sequence[Tensor]]
"""(part of the model, micro-batch, what the part before it passed on, the context of its stacks' calls) -> tensors
for the next part. The first part is given none and knows its input; the last part's output is the loss of the
micro-batch, its share of the step's."""


class Averaging(Protocol):
    """Averages gradients over replicas: `GradientAverager` or `ShardedGradientAverager`."""

    def overlapped(self) -> AbstractContextManager[Any]:
        """Context of the last backward pass of a step, left once all messages of the stage have been sent."""

    def begin_pass(self, part: int | None) -> None:
        """Begin a pass of a part of the model that computes weight gradients: W, or B where there is no W."""

    def end_pass(self) -> None:
        """End a pass."""

    def forget(self) -> None:
        """Drop the gradients of a step that failed."""


@dataclass
class _InFlight:
    """Micro-batch between the forward and the backward pass of a part."""

    piece: Piece
    inputs: list[tuple[torch.Size, torch.dtype]]
    gradient: Tensor | None
    handles: StackHandles


class StageRunner:
    """Runs the schedule of one stage of `pipeline`.

    stage: this rank's. messages: to and from its neighbours; None for a pipeline of one stage. A receive completes or
    raises an error that names it. An exception closes the lanes, so that neighbours raise, too; messages and runner
    must then be created again.
    """

    def __init__(self, pipeline: Schedule, stage: int, messages: StageMessages | None) -> None:
        if messages is None and pipeline.num_stages > 1:
            raise ValueError(f"{pipeline.num_stages} stages need messages between them; pass a StageMessages")
        self.pipeline, self.stage, self.messages = pipeline, stage, messages
        ops = pipeline.stages[stage]
        # Recomputation right before the backward pass is left to the stack, which overlaps its all-reduces.
        inside = {op for op, after in itertools.pairwise(ops) if op.kind == "R" and after == op._replace(kind="B")}
        self._steps = tuple(Step(op, str(op)) for op in ops if op not in inside)
        self._forward_steps = tuple(step for step in self._steps if "F" in (step.op.kind, step.op.of))
        parts = {op.block for op in ops}
        self._last_part = pipeline.num_blocks - 1
        # Where a part and the one after it are on one stage, what passes between them stays here.
        self._behind = {part: part + 1 for part in parts if part + 1 in parts}
        self._before = {behind: part for part, behind in self._behind.items()}
        kinds = [step.op.kind for step in self._steps]
        self._last_backward = max((at for at, kind in enumerate(kinds) if kind in ("B", "W")), default=0)
        self._splits_weights = "W" in kinds
        self._average: Averaging | None = None
        self._flights: dict[Place, _InFlight] = {}
        self._weights: dict[Place, StackHandles] = {}  # deferred weight gradients, until their W
        self._arrived: dict[Place, list[Tensor]] = {}
        self._leaving: dict[Place, list[Tensor]] = {}

    def run(
        self, forward: Forward, average: Averaging | None = None, *,
        spans: list[tuple[str, float, float]] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Run all forward and backward passes of a step; return the losses, by micro-batch, where the last part is.

        average: of the gradients over replicas; None: they accumulate in the parameters alone. spans: list to append
        (op, start, end) of every op to, in seconds of time.perf_counter().
        """
        losses: list[Tensor] = []
        self._average = average
        with self._executor(forward, losses, spans) as executor, ExitStack() as stack:
            executor.run(self._steps[: self._last_backward])
            if average is not None:
                stack.enter_context(average.overlapped())
            executor.run(self._steps[self._last_backward :])
        return losses

    @torch.no_grad()
    def evaluate(self, forward: Forward) -> list[Tensor]:
        """Run the forward passes alone; return the losses, by micro-batch, where the last part is."""
        losses: list[Tensor] = []
        with self._executor(forward, losses, keep=False) as executor:
            executor.run(self._forward_steps)
        return losses

    @contextmanager
    def _executor(
        self, forward: Forward, losses: list[Tensor], spans: list[tuple[str, float, float]] | None = None, *,
        keep: bool = True,
    ) -> Iterator[Executor]:  # fmt: skip
        """Context of a list: begins and ends its messages; after a failure releases tensors and closes the lanes."""
        handlers: dict[str, Callable[[Step], None]] = {
            "F": partial(self._do_F, forward, losses, keep),
            "R": self._do_R, "B": self._do_B, "W": self._do_W,
            **{f"send {of}": self._send for of in "FB"}, **{f"receive {of}": self._receive for of in "FB"},
        }  # fmt: skip
        executor = Executor(handlers, self.pipeline, f"stage {self.stage}", Context(spans))
        steps = self._steps if keep else self._forward_steps
        monitor = monitor_of(dist.group.WORLD if dist.is_initialized() else None)
        if monitor is not None:
            monitor.check()
        try:
            with FailTogether(
                monitor, executor.place, remedy=executor.remedy
            ):  # neighbours then know why lanes close
                if self.messages is not None:
                    self.messages.begin(step.op for step in steps)
                yield executor
                if self.messages is not None:
                    self.messages.end()
        except BaseException:
            self._forget()
            if self._average is not None and keep:
                self._average.forget()
            if self.messages is not None:
                self.messages.close()
            raise

    def _forget(self) -> None:
        for held in (self._flights, self._weights, self._arrived, self._leaving):
            held.clear()

    @property
    def _messages(self) -> StageMessages:
        assert self.messages is not None, "a message needs a neighbour"
        return self.messages

    def _send(self, step: Step) -> None:
        self._messages.send(step.op, self._leaving.pop(step.place))

    def _receive(self, step: Step) -> None:
        self._arrived[step.place] = self._messages.receive(step.op)

    def _do_F(self, forward: Forward, losses: list[Tensor], keep: bool, step: Step) -> None:  # noqa: N802
        place, context = step.place, Context()
        inputs = self._arrived.pop(place, [])
        form = [(x.shape, x.dtype) for x in inputs]
        piece = Piece([])  # its gradients accumulate in the parameters, and hooks run
        if keep:
            inputs = [piece.input(x) for x in inputs]
        outputs = forward(*place, inputs, context)
        is_loss = step.block == self._last_part
        results = [piece.output(y) if keep else y.detach() for y in outputs]
        if keep:
            gradient = torch.ones_like(results[0]) if is_loss else None
            self._flights[place] = _InFlight(piece, form, gradient, context.handles)
        if is_loss:
            losses.append(results[0])
        else:
            self._pass_on(step, results, self._behind)

    def _do_R(self, step: Step) -> None:  # noqa: N802
        self._flights[step.place].handles.recompute()

    def _do_B(self, step: Step) -> None:  # noqa: N802
        place = step.place
        flight = self._flights.pop(place)
        gradients = self._arrived.pop(place) if flight.gradient is None else [flight.gradient]
        if self._splits_weights:
            flight.handles.defer_weights()
            self._weights[place] = flight.handles
        with nullcontext() if self._splits_weights else self._pass_of(step):
            found = flight.piece.backward(gradients)
        if flight.inputs:
            device = gradients[0].device
            made = [
                torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
                for gradient, (shape, dtype) in zip(found, flight.inputs, strict=True)
            ]
            self._pass_on(step, made, self._before)

    def _pass_on(self, step: Step, results: list[Tensor], here: Mapping[int, int]) -> None:
        """Keep results for their send, or for the next part if it is on this stage. here: the next part by part."""
        if step.block in here:
            self._arrived[here[step.block], step.op.sub_batch] = results
        else:
            self._leaving[step.place] = results

    def _do_W(self, step: Step) -> None:  # noqa: N802
        with self._pass_of(step):
            self._weights.pop(step.place).compute_weights()

    @contextmanager
    def _pass_of(self, step: Step) -> Iterator[None]:
        """Context of a pass that computes weight gradients."""
        if self._average is not None:
            self._average.begin_pass(step.place[0])
        yield
        if self._average is not None:
            self._average.end_pass()
