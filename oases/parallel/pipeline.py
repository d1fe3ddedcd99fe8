"""Pipeline parallelism: one rank's part of a list of stages, run on micro-batches.

Not by `_PipelineScheduleRuntime` of torch.distributed.pipelining, for three reasons. Recomputing early is an op of
these lists, and there a stage recomputes in its backward pass or nowhere. It posts a receive, of both directions in
one group, where the list has it, and all that the ops of one step receive together: a message that takes long then
holds up one that is already there. Here each lane receives ahead, whatever the others do. And what its messages cost,
and which of them a rank waits for that hangs, `oases.report()` and errors could not say.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from oases.execution.calls import Calls
from oases.parallel.messages import Messages
from oases.schedule import Op, Schedule

Forward = Callable[[int, int, Tensor | None], tuple[Tensor, Calls]]
"""(part of the model, micro-batch, its input) -> its output, and its calls of stacks. The first part is given
None and knows its input; the last part's output is the loss of the micro-batch, its share of the step's."""


Place = tuple[int, int]
"""(part, micro-batch)."""


@dataclass
class _Flight:
    """A micro-batch between the forward and the backward pass of a part."""

    x: Tensor | None
    root: GradientEdge
    gradient: Tensor | None
    calls: Calls


class StageRun:
    """Runs the list of one stage of `pipeline`.

    stage: this rank's. messages: to and from its neighbours; None for a pipeline of one stage. A receive comes to an
    end in time or with an error that names it; what raises here ends the lanes, so that neighbours raise, too, and
    afterwards messages and run are to be made anew.
    """

    def __init__(self, pipeline: Schedule, stage: int, messages: Messages | None) -> None:
        if messages is None and pipeline.num_stages > 1:
            raise ValueError(f"{pipeline.num_stages} stages need messages between them; give a Messages")
        self.pipeline, self.stage, self.messages = pipeline, stage, messages
        self._ops = pipeline.stages[stage]
        self._forward_ops = tuple(op for op in self._ops if "F" in (op.kind, op.of))
        self._last_part = pipeline.num_blocks - 1
        again = [(op, after) for op, after in itertools.pairwise(self._ops) if op.kind == "R"]
        # Right before its backward pass, recomputation is the stack's own: it hides all-reduces under it.
        self._early = {op for op, after in again if after != op._replace(kind="B")}
        self._last_backward = max((at for at, op in enumerate(self._ops) if op.kind in ("B", "W")), default=-1)
        self._flights: dict[Place, _Flight] = {}
        self._weights: dict[Place, Calls] = {}  # whose weight gradients wait for their W
        self._arrived: dict[Place, Tensor] = {}
        self._leaving: dict[Place, Tensor] = {}
        self.spans: list[tuple[str, float, float]] | None = None
        """Set to a list to have (op, start, end) of every op appended, in seconds of time.perf_counter()."""

    def run(self, forward: Forward, around_last: AbstractContextManager[Any] | None = None) -> list[Tensor]:
        """All forward and backward passes of a step; returns the losses, by micro-batch, on the last stage.

        around_last: entered before the stage's last B, or its last W where there are any, and left when all its
        messages are under way (`GradientAverage.overlapped()`). Gradients are added to those of the parameters.
        """
        with self._ended(self._ops), ExitStack() as stack:
            losses: list[Tensor] = []
            for at, op in enumerate(self._ops):
                if at == self._last_backward and around_last is not None:
                    stack.enter_context(around_last)
                self._do(op, forward, losses)
        return losses

    @torch.no_grad()
    def evaluate(self, forward: Forward) -> list[Tensor]:
        """The forward passes alone; returns the losses, by micro-batch, on the last stage."""
        losses: list[Tensor] = []
        with self._ended(self._forward_ops):
            for op in self._forward_ops:
                self._do(op, forward, losses, keep=False)
        return losses

    @property
    def _messages(self) -> Messages:
        assert self.messages is not None, "a message needs a neighbour"
        return self.messages

    @contextmanager
    def _ended(self, ops: tuple[Op, ...]) -> Iterator[None]:
        """Around a list: messages begin and end with it; after a failure nothing is held and the lanes are ended."""
        try:
            if self.messages is not None:
                self.messages.begin(ops)
            yield
            if self.messages is not None:
                self.messages.end()
        except BaseException:
            for held in (self._flights, self._weights, self._arrived, self._leaving):
                held.clear()
            if self.messages is not None:
                self.messages.close()
            raise

    def _do(self, op: Op, forward: Forward, losses: list[Tensor], *, keep: bool = True) -> None:
        place, start = (op.block, op.sub_batch), time.perf_counter()
        if op.kind == "receive":
            self._arrived[place] = self._messages.receive(op)
        elif op.kind == "send":
            self._messages.send(op, self._leaving.pop(place))
        elif op.kind == "F":
            self._do_forward(place, forward, losses, keep)
        elif op.kind == "R":
            if op in self._early:
                self._flights[place].calls.recompute()
        elif op.kind == "W":
            self._weights.pop(place).compute_weights()
        else:
            self._do_backward(place)
        if self.spans is not None:
            self.spans.append((str(op), start, time.perf_counter()))

    def _do_forward(self, place: Place, forward: Forward, losses: list[Tensor], keep: bool) -> None:
        x = self._arrived.pop(place, None)
        if x is not None and keep:
            x.requires_grad_()
        y, calls = forward(*place, x)
        is_loss = place[0] == self._last_part
        if keep:
            # The edge alone: what was sent need not be kept for the backward pass.
            gradient = torch.ones_like(y) if is_loss else None
            self._flights[place] = _Flight(x, get_gradient_edge(y), gradient, calls)
        if is_loss:
            losses.append(y.detach())
        else:
            self._leaving[place] = y.detach()

    def _do_backward(self, place: Place) -> None:
        flight = self._flights.pop(place)
        gradient = self._arrived.pop(place) if flight.gradient is None else flight.gradient
        if self.pipeline.has_weight_passes:
            flight.calls.put_weights_off()
            self._weights[place] = flight.calls
        torch.autograd.backward([flight.root], [gradient])
        if flight.x is not None:
            assert flight.x.grad is not None, "the input is what the part computes on"
            self._leaving[place] = flight.x.grad
