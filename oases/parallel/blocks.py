"""One forward and backward pass of a stack: the ops of a schedule run on real tensors.

Every (block, sub-batch) has autograd graphs of its own, cut at the collectives, so the backward pass runs in schedule
order instead of autograd's. With recomputation, a block keeps its input and nothing else.

Names: x = a block's input; h = what F reads of it: x itself, or with sequence parallelism what the ranks' parts of it
were joined to; y = F's partial sums and, once waited for, their sum; out = combine(x, y), the next block's x. In the
backward pass g = gradient of h, a partial sum until its collective is waited for, then the gradient of x through F.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from oases.execution.failure import Guard, Watch
from oases.execution.piece import Gradients, Graph, Leaves, Methods
from oases.execution.weight_gradient import PutOff, putting_off
from oases.execution.wire import Wire
from oases.parallel.fsdp import Gathers, Unit
from oases.parallel.inputs import Inputs
from oases.parallel.randomness import Randomness
from oases.parallel.sub_batches import SubBatches
from oases.schedule import Op, Schedule, ScheduleError
from oases.schedule.ops import STARTS

Place = tuple[int, int]
"""(block, sub-batch)."""
_AGAIN = ("R", "RC")


class Execution:
    """Runs `schedule` over the blocks on one batch. Made once per call of a stack.

    cut: how the batch is cut. inputs: what the blocks read besides `x`. units: of blocks whose weights are sharded,
    if any. watch: tells the other ranks of an op that fails. spans: list to append (op, start, end) of every compute
    op and wait to, in what `clock` gives.
    """

    def __init__(
        self,
        methods: Sequence[Methods],
        schedule: Schedule,
        wire: Wire,
        x: Tensor,
        *,
        differentiable: bool,
        randomness: Randomness,
        cut: SubBatches,
        inputs: Inputs,
        units: Sequence[Unit | None] = (),
        watch: Watch | None = None,
        spans: list[tuple[str, Any, Any]] | None = None,
        clock: Callable[[], Any] = time.perf_counter,
    ) -> None:
        self.guard = Guard(schedule, wire.label, watch, self._forget)
        self._methods = methods
        self._schedule = schedule
        self._wire = wire
        self._differentiable = differentiable
        if differentiable and not schedule.backward:
            raise ScheduleError(f"schedule '{schedule.name}' has no backward pass, and gradients were asked for")
        self._randomness = randomness
        self._cut = cut
        self.inputs = inputs
        self._gathers = Gathers(units, [m.prepare is not None for m in methods])
        self._spans = spans
        self._clock = clock
        self._backward: tuple[Op, ...] = schedule.backward
        self._position = 0
        self._with_w = {(op.block, op.sub_batch) for op in schedule if op.kind == "W"}
        self._apart = {(op.block, op.sub_batch) for op in schedule if op.kind == "BC"}
        self._gathered = {op.carried for op in schedule if op.kind == "all_gather"}
        # Data on its way from op to op.
        self._x: dict[Place, Tensor] = {}
        self._h: dict[Place, Tensor] = {}
        self._y: dict[Place, Tensor] = {}
        self._to_gather: dict[Op, Tensor] = {}  # parts of a sequence, by the op that made them
        self._outputs: dict[int, Tensor] = {}  # of the last block, by sub-batch
        self._g: dict[Place, Tensor] = {}
        self._grad_y: dict[Place, Tensor] = {}
        self._residual: dict[Place, Tensor] = {}  # gradient of x past the block, through combine
        # What the backward pass will use.
        self._prepare: dict[Place, Graph] = {}
        self._partial: dict[Place, Graph] = {}
        self._combine: dict[Place, Graph] = {}
        self._put_off: dict[Place, PutOff] = {}
        self._weights_wait = False
        self._waiting_leaves: dict[int, dict[str, Tensor]] = {}  # what the notes that wait are of, by block
        # Stand-ins and their gradients, apart for what runs before the sum over ranks and after it.
        both = zip(methods, self._gathers.parameters, strict=True)
        self._leaves = [(m.partial.leaves(whole), m.combine.leaves(whole)) for m, whole in both]
        for s, part in enumerate(cut.split(x.detach())):
            self._h[0, s], self._x[0, s] = part, cut.tokens.part(part)

    def run_forward(self) -> Tensor:
        """Run the forward ops; return the output, [batch, ...] in the order of the input."""
        with self.guard:
            self._gathers.begin(self._schedule.forward)
            self._run(self._schedule.forward)
            self.guard.doing = "the output"
            return self._cut.join([self._outputs.pop(s) for s in range(self._cut.number)])

    def begin_backward(self, grad: Tensor) -> None:
        """Take the gradient of the output."""
        if self._position or not self._put_off:
            raise RuntimeError(
                "the backward pass of this OverlappedStack call was run already; its graphs are freed as it "
                "goes, so call the stack again for a second backward pass"
            )
        for s, part in enumerate(self._cut.split(grad)):
            self._g[self._schedule.num_blocks, s] = self._cut.tokens.part(part)
        self._gathers.begin(self._backward[self._position :])

    def recompute(self) -> None:
        """Run every R and RC of the rest of the backward pass now, with their collectives, in the list's order."""
        rest = self._backward[self._position :]
        again = [op for op in rest if (op.of or op.kind) in _AGAIN]
        left = tuple(op for op in rest if (op.of or op.kind) not in _AGAIN)
        self._backward = self._backward[: self._position] + left
        self._gathers.begin(again)
        with self.guard:
            self._run(again)

    def put_weights_off(self) -> None:
        """Leave W out of the backward pass; `weights_of` computes what it would have."""
        self._weights_wait = True

    def weights_of(self, block: int) -> Gradients:
        """The weight gradients of a block that the backward pass left out, by parameter name."""
        names = {id(stand_in): name for name, stand_in in self._waiting_leaves.pop(block).items()}
        sums: dict[int, Tensor] = {}
        for place in [place for place in self._put_off if place[0] == block]:
            self._put_off.pop(place).add_to(sums)
        return {names[number]: gradient for number, gradient in sums.items()}

    def run_backward_of(self, block: int) -> None:
        """Run on to the last op that makes gradients of `block`, and start the collective that follows it."""
        ops = self._backward
        mine = [i for i, op in enumerate(ops) if op.block == block and op.kind in ("BC", "B", "W")]
        # Its norm runs before the gather, so the gradient comes back to it with the backward pass of the block below.
        below = [i for i, op in enumerate(ops) if op.block == block - 1 and op.kind == "BC"]
        if self._methods[block].prepare is not None:
            mine += below
        end = max(mine) + 1 if mine else 0
        if end < len(ops) and ops[end].kind in STARTS:
            end += 1
        self._run_backward_to(end)

    def run_backward_rest(self) -> Tensor:
        """Run what is left; return the gradient of the input."""
        self._run_backward_to(len(self._backward))
        self.guard.doing = "the gradient of the input"
        grad = self._cut.join([self._total_gradient(0, s) for s in range(self._cut.number)])
        return self._wire.gather(grad, "gradient of the input") if self._cut.tokens.size > 1 else grad

    def gradients_of(self, block: int) -> tuple[Gradients, Gradients]:
        """Gradients by parameter name: this rank's shares of sums over the ranks, and whole ones."""
        shares, whole = (leaves.sums for leaves in self._leaves[block])
        if self._weights_wait:
            self._waiting_leaves[block] = self._leaves[block][0].tensors
        self._leaves[block] = (Leaves(), Leaves())
        if self._cut.tokens.size == 1:
            return shares, whole
        for name, gradient in whole.items():  # of this rank's tokens alone
            shares[name] = shares[name].add_(gradient) if name in shares else gradient
        return shares, {}

    def _forget(self) -> None:
        """After a failure: let go of every tensor."""
        for held in (
            self._x, self._h, self._y, self._to_gather, self._outputs, self._g, self._grad_y, self._residual,
        ):  # fmt: skip
            held.clear()
        for graphs in (self._prepare, self._partial, self._combine, self._put_off):
            graphs.clear()
        self._waiting_leaves.clear()
        self._leaves = [(Leaves(), Leaves()) for _ in self._methods]
        self._gathers.forget()
        self.inputs.forget()
        self._wire.forget()

    def _run_backward_to(self, end: int) -> None:
        begin, self._position = self._position, max(end, self._position)
        self._run(self._backward[begin : self._position])

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            self.guard.doing = op
            if op.kind in STARTS:
                self._start(op, (op.block, op.sub_batch))
                continue
            start = self._clock() if self._spans is not None else None
            self._gathers.before(op)
            getattr(self, f"_do_{op.kind}")(op, (op.block, op.sub_batch))
            self._gathers.after(op)
            if self._spans is not None:
                self._spans.append((str(op), start, self._clock()))

    def _start(self, op: Op, place: Place) -> None:
        if op.kind == "all_gather":
            tensor = self._to_gather.pop(op.carried)
        else:
            tensor = (self._g if op.of == "B" else self._y).pop(place)
        self._wire.start(op, tensor)

    def _do_wait(self, op: Op, place: Place) -> None:
        result, (block, s) = self._wire.wait(op), place
        if op.of in ("F", "R"):
            self._y[place] = result
        elif op.of == "B":
            self._g[place] = result
        elif op.of == "BC":
            self._grad_y[place] = result
        elif block + 1 < self._schedule.num_blocks:
            self._h[block + 1, s] = result
        else:
            self._outputs[s] = result

    # --- a block up to its row-parallel product ---

    def _do_F(self, op: Op, place: Place) -> None:  # noqa: N802
        again = ("R", *place) in self._schedule.recomputed
        keep = self._differentiable and again
        put_off = self._put_off[place] = PutOff(self._leaves[op.block][0].tensors.values())
        h = self._take_parts(self._h, place)
        y = self._run_partial(place, h, putting_off(put_off), graph=self._differentiable and not again)
        if keep and place not in self._schedule.remade_inputs:
            self._h[place] = h
        if keep:  # R makes graph and notes anew; what it must know is whether y is a product nobody else reads
            put_off.forget_unless_last(y)
        else:
            put_off.forget()
        if not self._differentiable:
            del self._put_off[place]
        self._set_parts(self._y, place, y)

    def _do_R(self, op: Op, place: Place) -> None:  # noqa: N802
        put_off = self._put_off[place]
        whole = Op("R", *place) in self._schedule.starts
        y = self._run_partial(place, self._h.pop(place), putting_off(put_off, skip_last=not whole), graph=True)
        put_off.forget()
        if whole:
            self._set_parts(self._y, place, y)

    def _run_partial(self, place: Place, h: Tensor, noting: AbstractContextManager[None], *, graph: bool) -> Tensor:
        block, s = place
        method, leaves, values = self._methods[block].partial, self._leaves[block][0], self.inputs.values(block, s)
        extent = self._cut.whole_extent() if block in self._schedule.joint else self._cut.extent(s)
        with noting, self._randomness.of("partial", block, s, extent):
            if not graph:
                return method.run(leaves, h, *values)
            y, self._partial[place] = method.record(leaves, h, values=values)
        # The sum is written over y. Should a graph have saved y itself, this makes autograd refuse to use it.
        torch.autograd.graph.increment_version(y)
        return y.detach()

    def _take_parts(self, parts: dict[Place, Tensor], place: Place) -> Tensor:
        """The tensor at `place`; of a joint block, whose ops run once, that of all sub-batches."""
        block, _ = place
        if block not in self._schedule.joint:
            return parts.pop(place)
        return self._cut.join([parts.pop((block, s)) for s in range(self._cut.number)])

    def _set_parts(self, parts: dict[Place, Tensor], place: Place, whole: Tensor) -> None:
        """The opposite of `_take_parts`."""
        block, _ = place
        if block not in self._schedule.joint:
            parts[place] = whole
            return
        for s, part in enumerate(self._cut.split(whole)):
            parts[block, s] = part

    # --- what follows the sum ---

    def _do_C(self, op: Op, place: Place) -> None:  # noqa: N802
        again = ("RC", *place) in self._schedule.recomputed
        keep = self._differentiable and again and place not in self._schedule.remade_inputs
        x = self._x[place] if keep else self._x.pop(place)
        self._combined(op, place, x, graph=self._differentiable and not again)

    def _do_RC(self, op: Op, place: Place) -> None:  # noqa: N802
        self._combined(op, place, self._x.pop(place), graph=True)

    def _combined(self, op: Op, place: Place, x: Tensor, *, graph: bool) -> None:
        """Run combine and hand its result to the next block, or to the output."""
        block, s = place
        method, leaves, values = self._methods[block].combine, self._leaves[block][1], self.inputs.values(block, s)
        y = self._y.pop(place)
        with self._randomness.of("combine", block, s, self._cut.extent_between(s)):
            if graph:
                out, self._combine[place] = method.record(leaves, x, y, values=values)
                out = out.detach()
            else:
                out = method.run(leaves, x, y, *values)
        following = (block + 1, s)
        last = block + 1 == self._schedule.num_blocks
        if op.kind == "RC" and following not in self._schedule.remade_inputs:
            return
        if not last:
            self._x[following] = out
            kept_later = op.kind == "C" and following in self._schedule.remade_inputs
            out = self._prepared(following, out, graph=self._differentiable and not kept_later)
        if op in self._gathered:
            self._to_gather[op] = out
        elif last:
            self._outputs[s] = out
        else:
            self._h[following] = out

    def _prepared(self, place: Place, x: Tensor, *, graph: bool) -> Tensor:
        """What F of `place` reads of x; the same thing, unless the block is halved."""
        block, s = place
        method, leaves, values = self._methods[block].prepare, self._leaves[block][0], self.inputs.values(block, s)
        if method is None:
            return x
        with self._randomness.of("prepare", block, s, self._cut.extent_between(s)):
            if not graph:
                return method.run(leaves, x, *values)
            h, self._prepare[place] = method.record(leaves, x, values=values)
        return h.detach()

    # --- backward ---

    def _do_BC(self, op: Op, place: Place) -> None:  # noqa: N802
        block, s = place
        total = self._total_gradient(block + 1, s)
        graph, leaves = self._combine.pop(place), self._leaves[block][1]
        residual, grad_y = graph.differentiate(total, leaves, self.inputs.whole(block, s))
        if residual is not None:
            self._residual[place] = residual
        if grad_y is None:
            raise RuntimeError(f"block {block}: combine(x, y) does not depend on y; return a value that uses it")
        if op in self._gathered:
            self._to_gather[op] = grad_y
        else:
            self._grad_y[place] = grad_y

    def _do_B(self, op: Op, place: Place) -> None:  # noqa: N802
        block, s = place
        if place not in self._apart:
            self._do_BC(op, place)
        grad_y = self._take_parts(self._grad_y, place)
        graph, leaves, put_off = self._partial.pop(place), self._leaves[block][0], self._put_off[place]
        (g,) = graph.differentiate(grad_y, leaves, self.inputs.shares(block, s), put_off=put_off)
        if g is None:
            raise RuntimeError(f"block {block}: partial(x) does not depend on x; it must be differentiable in x")
        # The sum over ranks is written over g; it must not be memory that others still read.
        noted = (note.grad for note in put_off.notes)
        readers = [grad_y, *self._residual.values(), *self._g.values(), *noted]
        shared = {t.untyped_storage().data_ptr() for t in readers}
        self._set_parts(self._g, place, g.clone() if g.untyped_storage().data_ptr() in shared else g)
        if place not in self._with_w:
            self._do_W(op, place)

    def _do_W(self, op: Op, place: Place) -> None:  # noqa: N802
        if self._weights_wait:
            return
        leaves = self._leaves[op.block][0]
        names, sums = {id(stand_in): name for name, stand_in in leaves.tensors.items()}, leaves.sums
        by_id = {number: sums[name] for number, name in names.items() if name in sums}
        self._put_off.pop(place).add_to(by_id)
        sums.update({names[number]: gradient for number, gradient in by_id.items()})

    def _total_gradient(self, block: int, sub_batch: int) -> Tensor:
        """Gradient of the block's input: through the block, reduced, plus past it."""
        place = (block, sub_batch)
        g, residual = self._g.pop(place), self._residual.pop(place, None)
        if place in self._prepare:
            graph, leaves = self._prepare.pop(place), self._leaves[block][0]
            (through,) = graph.differentiate(g, leaves, self.inputs.shares(block, sub_batch))
            if through is None:
                raise RuntimeError(f"block {block}: prepare(x) does not depend on x; it must be differentiable in x")
            return through if residual is None else through + residual
        return g if residual is None else g.add_(residual)
