"""One forward and backward pass of a stack: the ops of a schedule run on real tensors.

Every (block, sub-batch) has an autograd graph of its own, cut at the all-reduces, so the backward pass runs in
schedule order instead of autograd's. Tensors are dropped as soon as no op that is still to come needs them.

Names: x = a block's input, y = its partial sums and, once waited for, their sum; out = combine(x, y), the next
block's input. g = gradient of x through `partial`, a partial sum until its all-reduce is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oases.parallel.weight_gradient import PutOff, putting_off
from oases.schedule import Op, Schedule

Place = tuple[int, int]  # (block, sub-batch)


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

    The parameters are stand-ins (detached, sharing memory), so that the gradient hooks of the real ones fire
    once per step in the outer graph and not once per sub-batch in here.
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


class Execution:
    """Runs `schedule` over `blocks` on one batch. Made by OverlappedStack, once per call."""

    def __init__(
        self,
        methods: Sequence[tuple[Method, Method]],
        schedule: Schedule,
        scheduler: Scheduler,
        x: Tensor,
        *,
        differentiable: bool,
        spans: list[tuple[str, float, float]] | None = None,
    ) -> None:
        self._methods = methods
        self._schedule = schedule
        self._scheduler = scheduler
        self._differentiable = differentiable
        self._spans = spans
        self._backward: tuple[Op, ...] = schedule.backward
        self._position = 0
        self._batch_sizes = [part.shape[0] for part in x.tensor_split(schedule.num_sub_batches)]
        self._x: dict[Place, Tensor] = {}
        self._y: dict[Place, Tensor] = {}  # root of partial's graph
        self._reduced: dict[Place, Tensor] = {}  # leaf of combine's graph, on the memory of y
        self._out: dict[Place, Tensor] = {}
        self._tickets: dict[Op, Any] = {}
        self._residual: dict[Place, Tensor] = {}  # gradient of x past the block, through combine
        self._g: dict[Place, Tensor] = {}
        self._put_off: dict[Place, PutOff] = {}
        self._with_w = {(op.block, op.sub_batch) for op in schedule if op.kind == "W"}
        # Stand-ins and their gradients, apart for partial (a share of the sum over ranks) and combine (whole).
        self._parameters = [tuple(method.stand_ins() for method in pair) for pair in methods]
        self._gradients: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = [({}, {}) for _ in methods]
        for s, part in enumerate(x.detach().tensor_split(schedule.num_sub_batches)):
            self._x[0, s] = self._leaf(part)

    def run_forward(self) -> Tensor:
        """Run the forward ops; return the output, [batch, ...] in the order of the input."""
        with torch.set_grad_enabled(self._differentiable):
            self._run(self._schedule.forward)
        last = self._schedule.num_blocks - 1
        outs = [self._out[last, s].detach() for s in range(self._schedule.num_sub_batches)]
        if not self._differentiable:
            self._out.clear()
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def begin_backward(self, grad: Tensor) -> None:
        """Take the gradient of the output."""
        if self._position or not self._out:
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

    def gradients_of(self, block: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients by parameter name made by `partial` (this rank's share) and by `combine` (whole)."""
        self._parameters[block] = ({}, {})
        found, self._gradients[block] = self._gradients[block], ({}, {})
        return found

    def _run_backward_to(self, end: int) -> None:
        begin, self._position = self._position, max(end, self._position)
        with torch.enable_grad():
            self._run(self._backward[begin : self._position])

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            start = time.perf_counter()
            getattr(self, f"_do_{op.kind}")(op, (op.block, op.sub_batch))
            if self._spans is not None and op.kind != "all_reduce":
                self._spans.append((str(op), start, time.perf_counter()))

    def _leaf(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(self._differentiable)

    def _do_F(self, op: Op, place: Place) -> None:  # noqa: N802
        partial = self._methods[op.block][0]
        x = self._x[place]
        put_off = self._put_off[place] = PutOff()
        with putting_off(put_off):
            y = torch.func.functional_call(partial, self._parameters[op.block][0], (x,))
        # The sum is written over y. Should a graph have saved y itself, this makes autograd refuse to use it.
        if self._differentiable:
            torch.autograd.graph.increment_version(y)
        self._y[place] = y

    def _do_all_reduce(self, op: Op, place: Place) -> None:
        carried = op.carried
        if op.of == "F":
            self._reduced[place] = self._leaf(self._y[place].contiguous())
            tensor = self._reduced[place].detach()
        else:
            tensor = self._g[place]
        self._tickets[carried] = self._scheduler.all_reduce(tensor, str(carried))

    def _do_wait(self, op: Op, place: Place) -> None:
        self._scheduler.wait(self._tickets.pop(op.carried))

    def _do_C(self, op: Op, place: Place) -> None:  # noqa: N802
        b, s = place
        combine = self._methods[b][1]
        out = torch.func.functional_call(combine, self._parameters[b][1], (self._x[place], self._reduced[place]))
        self._out[place] = out
        if b + 1 < self._schedule.num_blocks:
            self._x[b + 1, s] = self._leaf(out)
        if not self._differentiable:
            for kept in (self._x, self._y, self._reduced, self._put_off):
                del kept[place]
            if b + 1 < self._schedule.num_blocks:
                del self._out[place]

    def _do_B(self, op: Op, place: Place) -> None:  # noqa: N802
        b, _ = place
        total = self._total_gradient(b + 1, op.sub_batch)
        x, y = self._x.pop(place), self._reduced.pop(place)
        out, partial_sums = self._out.pop(place), self._y.pop(place)
        residual, grad_y = self._differentiate(out, total, (x, y), b, 1)
        if residual is not None:
            self._residual[place] = residual
        if grad_y is None:
            raise RuntimeError(f"block {b}: combine(x, y) does not depend on y; return a value that uses it")
        (g,) = self._differentiate(partial_sums, grad_y, (x,), b, 0)
        if g is None:
            raise RuntimeError(f"block {b}: partial(x) does not depend on x; it must be differentiable in x")
        # The sum over ranks is written over g; it must not be memory that others still read.
        shared = {t.untyped_storage().data_ptr() for t in (grad_y, total, residual) if t is not None}
        g = g.contiguous()
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

    def _differentiate(
        self, root: Tensor, grad: Tensor, inputs: tuple[Tensor, ...], block: int, method: int
    ) -> list[Tensor | None]:
        """Backward through one graph: gradients of `inputs`; those of the parameters are added up."""
        wanted = {n: p for n, p in self._parameters[block][method].items() if p.requires_grad}
        found = torch.autograd.grad(root, (*inputs, *wanted.values()), grad, allow_unused=True)
        sums = self._gradients[block][method]
        own = set()
        for name, gradient in zip(wanted, found[len(inputs) :], strict=True):
            if gradient is None:
                continue
            if name in sums:
                sums[name].add_(gradient)
                continue
            # Autograd may hand one tensor to two parameters, or an expanded one: sums need memory of their own.
            memory = gradient.untyped_storage().data_ptr()
            fresh = memory not in own and gradient.is_contiguous() and memory != grad.untyped_storage().data_ptr()
            own.add(memory)
            sums[name] = gradient if fresh else gradient.clone(memory_format=torch.contiguous_format)
        return list(found[: len(inputs)])
