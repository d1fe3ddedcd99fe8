"""One forward and backward pass of a stack: the ops of a schedule run on real tensors.

Every (block, sub-batch) has autograd graphs of its own, cut at the all-reduces, so the backward pass runs in schedule
order instead of autograd's. Only graph edges are held, not the tensors at them, so memory goes as soon as no graph
and no op to come needs it: with recomputation, a block keeps its input and nothing else.

Names: x = a block's input, y = its partial sums and, once waited for, their sum; out = combine(x, y), the next
block's input. g = gradient of x through `partial`, a partial sum until its all-reduce is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from oases.parallel.randomness import Randomness
from oases.parallel.weight_gradient import PutOff, putting_off
from oases.schedule import Op, Schedule, ScheduleError

Place = tuple[int, int]
"""(block, sub-batch)."""
Gradients = dict[str, Tensor]
"""By the name of the parameter within its block's Method."""


class Scheduler(Protocol):
    """What an execution asks of its collectives; `oases._C.OverlapScheduler` is the real one."""

    def all_reduce(self, tensor: Tensor, label: str = "") -> Any:
        """Start summing `tensor` over the ranks in place; return a ticket."""

    def wait(self, ticket: Any) -> None:
        """Return once the ticket's result may be used."""


class Silence:
    """A scheduler that sends nothing: what computes alone, for a group of one and for benchmarks."""

    def all_reduce(self, tensor: Tensor, label: str = "") -> None:
        """Leave `tensor` as it is."""

    def wait(self, ticket: None) -> None:
        """Return at once."""


class Method(nn.Module):
    """A block's `partial` or `combine` as a module of its own, with the parameters it runs on as an argument.

    The parameters are stand-ins (detached, sharing memory), so that the gradient hooks of the real ones fire once per
    step in the outer graph and not once per sub-batch in here.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self.block = block
        self.name = name

    def forward(self, *args: Tensor) -> Tensor:
        """Call the method."""
        result: Tensor = getattr(self.block, self.name)(*args)
        return result

    def stand_ins(self) -> dict[str, Tensor]:
        """Fresh stand-ins of all parameters, by name."""
        return {
            name: parameter.detach().requires_grad_(parameter.requires_grad)
            for name, parameter in self.named_parameters()
        }


class _Source(torch.autograd.Function):
    """Where a graph begins: an input whose gradient can be asked for by its edge, without keeping its memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:
        return data.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


@dataclass
class _Graph:
    """One graph by its edges: where gradients enter and where those of the inputs leave."""

    root: GradientEdge
    inputs: tuple[GradientEdge, ...]


class Execution:
    """Runs `schedule` over the blocks' (partial, combine) methods on one batch. Made once per call of a stack.

    wire_dtype: what sums travel in; None is their own. label: what the stack is called in errors and statistics.
    spans: list to append (op, start, end) of every compute op and wait to, monotonic seconds.
    """

    def __init__(
        self,
        methods: Sequence[tuple[Method, Method]],
        schedule: Schedule,
        scheduler: Scheduler,
        x: Tensor,
        *,
        differentiable: bool,
        randomness: Randomness,
        wire_dtype: torch.dtype | None = None,
        label: str = "stack 0",
        spans: list[tuple[str, float, float]] | None = None,
    ) -> None:
        self._methods = methods
        self._schedule = schedule
        self._scheduler = scheduler
        self._differentiable = differentiable
        if differentiable and not schedule.backward:
            raise ScheduleError(f"schedule '{schedule.name}' has no backward pass, and gradients were asked for")
        self._randomness = randomness
        self._wire_dtype = wire_dtype
        self._label = label
        self._spans = spans
        self._backward: tuple[Op, ...] = schedule.backward
        self._position = 0
        self._with_w = {(op.block, op.sub_batch) for op in schedule if op.kind == "W"}
        self._tickets: dict[Op, Any] = {}
        self._on_wire: dict[Op, Tensor] = {}  # narrower copies of what is being summed
        # Data on its way from op to op.
        self._x: dict[Place, Tensor] = {}
        self._y: dict[Place, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}  # of the last block, by sub-batch
        self._g: dict[Place, Tensor] = {}
        self._residual: dict[Place, Tensor] = {}  # gradient of x past the block, through combine
        # What the backward pass will use.
        self._partial: dict[Place, _Graph] = {}
        self._combine: dict[Place, _Graph] = {}
        self._put_off: dict[Place, PutOff] = {}
        # Stand-ins and their gradients, apart for partial (a share of the sum over ranks) and combine (whole).
        self._parameters = [tuple(method.stand_ins() for method in pair) for pair in methods]
        self._gradients: list[tuple[Gradients, Gradients]] = [({}, {}) for _ in methods]
        self._anchor = torch.zeros((), requires_grad=True)
        parts = x.detach().tensor_split(schedule.num_sub_batches)
        self._batch_sizes = [part.shape[0] for part in parts]
        for s, part in enumerate(parts):
            self._x[0, s] = part

    def run_forward(self) -> Tensor:
        """Run the forward ops; return the output, [batch, ...] in the order of the input."""
        self._run(self._schedule.forward)
        outputs = [self._outputs.pop(s) for s in range(self._schedule.num_sub_batches)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def begin_backward(self, grad: Tensor) -> None:
        """Take the gradient of the output."""
        if self._position or not self._put_off:
            raise RuntimeError(
                "the backward pass of this OverlappedStack call was run already; its graphs are freed as it "
                "goes, so call the stack again for a second backward pass"
            )
        for s, part in enumerate(grad.split(self._batch_sizes)):
            self._g[self._schedule.num_blocks, s] = part

    def run_backward_of(self, block: int) -> None:
        """Run on to the last op that makes gradients of `block`, and start the collective that follows it."""
        ops = self._backward
        mine = [i for i, op in enumerate(ops) if op.block == block and op.kind in ("B", "W")]
        end = mine[-1] + 1 if mine else 0
        if end < len(ops) and ops[end].kind == "all_reduce":
            end += 1
        self._run_backward_to(end)

    def run_backward_rest(self) -> Tensor:
        """Run what is left; return the gradient of the input."""
        self._run_backward_to(len(self._backward))
        parts = [self._total_gradient(0, s) for s in range(self._schedule.num_sub_batches)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gradients_of(self, block: int) -> tuple[Gradients, Gradients]:
        """Gradients by parameter name made by `partial` (this rank's share) and by `combine` (whole)."""
        self._parameters[block] = ({}, {})
        found, self._gradients[block] = self._gradients[block], ({}, {})
        return found

    def _run_backward_to(self, end: int) -> None:
        begin, self._position = self._position, max(end, self._position)
        self._run(self._backward[begin : self._position])

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            start = time.perf_counter()
            getattr(self, f"_do_{op.kind}")(op, (op.block, op.sub_batch))
            if self._spans is not None and op.kind != "all_reduce":
                self._spans.append((str(op), start, time.perf_counter()))

    def _do_F(self, op: Op, place: Place) -> None:  # noqa: N802
        again = ("R", *place) in self._schedule.recomputed
        put_off = self._put_off[place] = PutOff(self._parameters[op.block][0].values())
        self._run_partial(place, putting_off(put_off), graph=self._differentiable and not again)
        if not (again and self._differentiable):
            return
        # R makes graph and notes anew; what it needs to know is whether y is a product nobody else reads.
        put_off.forget_unless_last(self._y[place])

    def _do_R(self, op: Op, place: Place) -> None:  # noqa: N802
        put_off = self._put_off[place]
        whole = Op("all_reduce", *place, "R") in self._schedule.backward_set
        self._run_partial(place, putting_off(put_off, skip_last=not whole), graph=True)
        if not whole:
            del self._y[place]

    def _run_partial(self, place: Place, noting: AbstractContextManager[None], *, graph: bool) -> None:
        block, _ = place
        with torch.set_grad_enabled(graph), noting, self._randomness.of("partial", *place):
            x = self._source(self._x[place]) if graph else self._x[place]
            y = torch.func.functional_call(self._methods[block][0], self._parameters[block][0], (x,))
        if graph:
            self._partial[place] = _Graph(get_gradient_edge(y), (get_gradient_edge(x),))
            # The sum is written over y. Should a graph have saved y itself, this makes autograd refuse to use it.
            torch.autograd.graph.increment_version(y)
        self._y[place] = y.detach()

    def _do_all_reduce(self, op: Op, place: Place) -> None:
        sums = self._g if op.of == "B" else self._y
        tensor = sums[place] = sums[place].contiguous()
        if self._wire_dtype is not None and tensor.dtype != self._wire_dtype:
            tensor = self._on_wire[op.carried] = tensor.to(self._wire_dtype)
        self._tickets[op.carried] = self._scheduler.all_reduce(tensor, self._described(op))

    def _described(self, op: Op) -> str:
        """What a collective is called in errors and statistics; `oases.report` reads it back."""
        schedule = self._schedule
        return f"{op.carried} ({self._label}, line {schedule.lines[op]} of {schedule.name})"

    def _do_wait(self, op: Op, place: Place) -> None:
        self._scheduler.wait(self._tickets.pop(op.carried))
        narrow = self._on_wire.pop(op.carried, None)
        if narrow is not None:
            (self._g if op.of == "B" else self._y)[place].copy_(narrow)

    def _do_C(self, op: Op, place: Place) -> None:  # noqa: N802
        block, s = place
        again = ("RC", *place) in self._schedule.recomputed
        out = self._run_combine(place, graph=self._differentiable and not again)
        if block + 1 < self._schedule.num_blocks:
            self._x[block + 1, s] = out
        else:
            self._outputs[s] = out
        recomputed = ("R", *place) in self._schedule.recomputed
        if not (self._differentiable and recomputed and place not in self._schedule.remade_inputs):
            del self._x[place]
        if not self._differentiable:
            del self._put_off[place]

    def _do_RC(self, op: Op, place: Place) -> None:  # noqa: N802
        block, s = place
        out = self._run_combine(place, graph=True)
        if (block + 1, s) in self._schedule.remade_inputs:
            self._x[block + 1, s] = out

    def _run_combine(self, place: Place, *, graph: bool) -> Tensor:
        block, _ = place
        x, y = self._x[place], self._y.pop(place)
        with torch.set_grad_enabled(graph), self._randomness.of("combine", *place):
            if graph:
                x, y = self._source(x), self._source(y)
            out = torch.func.functional_call(self._methods[block][1], self._parameters[block][1], (x, y))
        if graph:
            self._combine[place] = _Graph(get_gradient_edge(out), (get_gradient_edge(x), get_gradient_edge(y)))
        return out.detach()

    def _source(self, data: Tensor) -> Tensor:
        source: Tensor = _Source.apply(self._anchor, data)
        return source

    def _do_B(self, op: Op, place: Place) -> None:  # noqa: N802
        block, s = place
        self._x.pop(place, None)
        total = self._total_gradient(block + 1, s)
        residual, grad_y = self._differentiate(self._combine.pop(place), total, block, 1)
        if residual is not None:
            self._residual[place] = residual
        if grad_y is None:
            raise RuntimeError(f"block {block}: combine(x, y) does not depend on y; return a value that uses it")
        (g,) = self._differentiate(self._partial.pop(place), grad_y, block, 0)
        if g is None:
            raise RuntimeError(f"block {block}: partial(x) does not depend on x; it must be differentiable in x")
        # The sum over ranks is written over g; it must not be memory that others still read.
        readers = [grad_y, total, residual, *(product[3] for product in self._put_off[place].products)]
        shared = {t.untyped_storage().data_ptr() for t in readers if t is not None}
        self._g[place] = g.clone() if g.untyped_storage().data_ptr() in shared else g
        if place not in self._with_w:
            self._do_W(op, place)

    def _do_W(self, op: Op, place: Place) -> None:  # noqa: N802
        names = {id(stand_in): name for name, stand_in in self._parameters[op.block][0].items()}
        sums = self._gradients[op.block][0]
        by_id = {number: sums[name] for number, name in names.items() if name in sums}
        self._put_off.pop(place).add_to(by_id)
        sums.update({names[number]: gradient for number, gradient in by_id.items()})

    def _total_gradient(self, block: int, sub_batch: int) -> Tensor:
        """Gradient of the block's input: through the block, reduced, plus past it."""
        g = self._g.pop((block, sub_batch))
        residual = self._residual.pop((block, sub_batch), None)
        return g if residual is None else g.add_(residual)

    def _differentiate(self, graph: _Graph, grad: Tensor, block: int, method: int) -> list[Tensor | None]:
        """Backward through one graph: gradients of its inputs; those of the parameters are added up."""
        wanted = {n: p for n, p in self._parameters[block][method].items() if p.requires_grad}
        inputs: list[Any] = [*graph.inputs, *wanted.values()]
        found = torch.autograd.grad([graph.root], inputs, [grad], allow_unused=True)
        sums = self._gradients[block][method]
        own = {t.untyped_storage().data_ptr() for t in (grad, *found[: len(graph.inputs)]) if t is not None}
        for name, gradient in zip(wanted, found[len(graph.inputs) :], strict=True):
            if gradient is None:
                continue
            if name in sums:
                sums[name].add_(gradient)
                continue
            # Autograd may hand one tensor to two parameters, or an expanded one: sums need memory of their own.
            memory = gradient.untyped_storage().data_ptr()
            fresh = memory not in own and gradient.is_contiguous()
            own.add(memory)
            sums[name] = gradient if fresh else gradient.clone(memory_format=torch.contiguous_format)
        return list(found[: len(graph.inputs)])
