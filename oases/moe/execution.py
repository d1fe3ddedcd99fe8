"""One forward and backward pass over blocks of experts: the ops of a schedule of experts run on real tensors.

N b and E b are cuts of the graph, so the backward pass runs in the order of the list instead of autograd's, and what
travels starts and ends where the list has it. Names as in `oases.schedule.experts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from oases.execution.group import ProcessGroup, group_rank
from oases.moe.cuts import Cut
from oases.moe.dispatch import Demand, Itinerary, Voyage, combined, grouped, itinerary, permuted, ungrouped
from oases.moe.layer import OverlappedMoE
from oases.moe.recomputation import Pass, Setting
from oases.moe.router import Routing
from oases.moe.transfer import Transfer
from oases.schedule import Op, Schedule


class ExpertBlock(Protocol):
    """A block of a stack of experts: what is in front of its experts, and what is behind.

    before(x) -> (x, h): h is what the experts read; x goes past them. after(x, y) -> the block's output, y what the
    experts made of h. Shapes: [..., hidden], y as h.
    """

    experts: OverlappedMoE

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See above."""

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """See above."""


@dataclass(eq=False)
class _State:
    """A block on its way through the pass."""

    setting: Setting
    opened: Pass | None
    non_expert: Cut | None = None
    experts: Cut | None = None
    routing: Routing | None = None
    demand: Demand | None = None
    plan: Itinerary | None = None
    source: Tensor | None = None
    shape: torch.Size | None = None
    transfer: Transfer | None = None
    copies: list[Tensor] | None = None
    own: list[Tensor] | None = None
    dispatch: Voyage | None = None
    combine: Voyage | None = None
    past: Tensor | None = None
    weights: Tensor | None = None
    rows: Tensor | None = None


class ExpertExecution:
    """Runs `schedule` over `blocks` on one batch. Made once per call of a stack.

    gradient_scale: times the experts' gradients, which at home are the sum over all tokens of the group.
    spans: list to append (op, start, end) of every compute op and wait to, in what `clock` gives.
    """

    def __init__(
        self,
        blocks: Sequence[ExpertBlock],
        schedule: Schedule,
        group: ProcessGroup | None,
        x: Tensor,
        *,
        differentiable: bool,
        gradient_scale: float = 1.0,
        spans: list[tuple[str, Any, Any]] | None = None,
        clock: Callable[[], Any] = time.perf_counter,
    ) -> None:
        self._blocks, self._schedule, self._group = blocks, schedule, group
        self._differentiable, self._gradient_scale = differentiable, gradient_scale
        self._recompute = schedule.recompute == "full" and differentiable
        self._spans, self._clock = spans, clock
        layers = [block.experts for block in blocks]
        tokens = x.numel() // x.shape[-1]
        self._states = [_State(*layer.begin(tokens)) for layer in layers]
        for layer, state in zip(layers, self._states, strict=True):
            if schedule.copies and state.setting.placement.moved:
                assert group is not None, "one device has no copies"
                state.transfer = Transfer(layer.experts.weights, state.setting.placement, group, layer.name)
        self._x: Tensor | None = x
        self._last: Cut | None = None
        self._grad: dict[str, Tensor | None] = {}
        self.doing: Op | str = "the start of the call"

    def run_forward(self) -> Tensor:
        """The output of the last block."""
        self._run(self._schedule.forward)
        assert self._last is not None
        (output,) = self._last.take()
        for state in self._states:
            if state.opened is not None:
                state.opened.done = True
        if not self._differentiable:
            self._states, self._last = [], None
        return output

    def run_backward(self, grad: Tensor) -> Tensor | None:
        """Gradients of all parameters, and that of the input."""
        if self._last is None:
            raise RuntimeError(
                "the backward pass of this ExpertStack call was run already; its graphs are freed as it goes; call "
                "the stack again for a second backward pass"
            )
        for state in self._states:
            if state.opened is not None:
                state.opened.closed = True
        self._grad["output"] = grad
        self._run(self._schedule.backward)
        return self._grad.pop("input")

    def _run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self.doing = op
            start = self._clock() if self._spans is not None else None
            if op.kind == "wait":
                getattr(self, f"_end_{op.of}")(op.block)
            elif op.kind == "all_to_all":
                getattr(self, f"_send_{op.of}")(op.block)
            else:
                getattr(self, f"_do_{op.kind}")(op.block)
            if self._spans is not None:
                self._spans.append((str(op), start, self._clock()))

    # --- forward ---

    def _do_N(self, b: int) -> None:  # noqa: N802
        before = self._states[b - 1] if b else None
        if before is None:
            assert self._x is not None
            inputs, self._x = [self._x], None
        else:
            assert before.past is not None
            assert before.rows is not None
            assert before.weights is not None
            inputs = [before.past, before.rows, before.weights]
            before.past = before.rows = before.weights = None
        cut = Cut(lambda *given: self._non_expert(b, *given), inputs, recompute=self._recompute)
        if b == len(self._blocks):
            self._last = cut
            return
        state = self._states[b]
        state.past, state.rows, state.weights = cut.take()
        state.non_expert = cut if self._differentiable else None

    def _non_expert(
        self, b: int, x: Tensor, rows: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if b:
            assert rows is not None
            assert weights is not None
            x = self._behind(b - 1, x, rows, weights)
        if b == len(self._blocks):
            return (x,)
        state, block = self._states[b], self._blocks[b]
        x, h = block.before(x)
        layer, state.shape = block.experts, h.shape
        flat = h.reshape(-1, h.shape[-1])
        routing, demand = layer.routed(flat, state.setting, state.demand)
        if state.demand is None:
            state.demand = demand
            state.plan = itinerary(demand.counts, state.setting.placement, group_rank(self._group), x.device)
        assert state.plan is not None
        tokens = layer.share(flat)
        rows, state.source = permuted(tokens, routing, state.plan)
        state.routing = replace(routing, weights=routing.weights.detach())
        shared = layer.shared_of(tokens)
        if shared is not None:  # past the experts, and added to what they make
            x = x + layer.whole(shared, len(flat)).view(h.shape)
        return x, rows, routing.weights

    def _behind(self, b: int, x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        state, block = self._states[b], self._blocks[b]
        assert state.routing is not None
        assert state.source is not None
        assert state.shape is not None
        y = combined(rows, state.source, replace(state.routing, weights=weights))
        return block.after(x, block.experts.whole(y, state.shape[:-1].numel()).view(state.shape))

    def _send_N(self, b: int) -> None:  # noqa: N802
        state = self._states[b]
        assert state.plan is not None
        name = f"dispatch of {self._blocks[b].experts.name}"
        state.dispatch = Voyage(self._group, state.plan.sent, state.plan.received, name)
        _depart(state, state.dispatch)

    def _end_N(self, b: int) -> None:  # noqa: N802
        _arrive(self._states[b], self._states[b].dispatch)

    def _do_P(self, b: int) -> None:  # noqa: N802
        state, layer = self._states[b], self._blocks[b].experts
        assert state.demand is not None
        assert state.routing is not None
        assert state.plan is not None
        if state.opened is not None:
            sent = 0 if state.transfer is None else state.transfer.bytes
            layer.observe(state.opened, state.demand, state.routing, state.plan, sent)

    def _do_E(self, b: int) -> None:  # noqa: N802
        state, layer = self._states[b], self._blocks[b].experts
        assert state.rows is not None
        own = layer.experts.weights.given
        inputs = [state.rows, *own, *(state.copies or [])]
        cut = Cut(lambda *given: self._experts(b, *given), inputs, recompute=self._recompute)
        (state.rows,) = cut.take()
        state.copies = None
        state.experts = cut if self._differentiable else None

    def _experts(self, b: int, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        state, layer = self._states[b], self._blocks[b].experts
        plan, form = state.plan, layer.experts.weights
        assert plan is not None
        number = len(form.given)
        rows = grouped(rows, plan)
        own, others = plan.rows[: plan.own], plan.rows[plan.own :]
        at_home, copied = rows.split([sum(own), sum(others)])
        found = [layer.compute(at_home, own, form.like(weights[:number]))]
        if others:
            found.append(layer.compute(copied, others, form.like(weights[number:])))
        return (ungrouped(torch.cat(found), plan),)

    def _send_E(self, b: int) -> None:  # noqa: N802
        state = self._states[b]
        assert state.plan is not None
        name = f"combine of {self._blocks[b].experts.name}"
        state.combine = Voyage(self._group, state.plan.received, state.plan.sent, name)
        _depart(state, state.combine)

    def _end_E(self, b: int) -> None:  # noqa: N802
        _arrive(self._states[b], self._states[b].combine)

    # --- copies ---

    def _do_share(self, b: int) -> None:
        state = self._states[b]
        if state.transfer is not None:
            state.transfer.scatter(self._blocks[b].experts.experts.weights.given)

    def _end_share(self, b: int) -> None:
        """`join` waits for it."""

    def _do_join(self, b: int) -> None:
        transfer = self._states[b].transfer
        if transfer is not None:
            transfer.exchange()

    def _end_join(self, b: int) -> None:
        state = self._states[b]
        if state.transfer is not None:
            state.copies = state.transfer.finish()

    def _do_split(self, b: int) -> None:
        state = self._states[b]
        if state.transfer is not None:
            assert state.copies is not None
            state.transfer.reduce(state.copies)
            state.copies = None

    def _end_split(self, b: int) -> None:
        """`return` waits for it."""

    def _do_return(self, b: int) -> None:
        transfer = self._states[b].transfer
        if transfer is not None:
            transfer.gather()

    def _end_return(self, b: int) -> None:
        state = self._states[b]
        assert state.own is not None
        if state.transfer is not None:
            state.transfer.collect(state.own)
        self._hand_over(b)

    def _hand_over(self, b: int) -> None:
        """Give the parameters at home their gradients, once, hooks included."""
        layer, state = self._blocks[b].experts, self._states[b]
        assert state.own is not None
        gradients, state.own = layer.summed_over_tensor_ranks(state.own), None
        if self._gradient_scale != 1.0:
            torch._foreach_mul_(gradients, self._gradient_scale)
        pairs = [
            (parameter, gradient)
            for parameter, gradient in zip(layer.experts.weights.given, gradients, strict=True)
            if parameter.requires_grad
        ]
        if pairs:
            parameters, given = zip(*pairs, strict=True)
            torch.autograd.backward(parameters, given)

    # --- backward ---

    def _do_RN(self, b: int) -> None:  # noqa: N802
        cut = self._last if b == len(self._blocks) else self._states[b].non_expert
        assert cut is not None
        cut.again()

    def _do_RE(self, b: int) -> None:  # noqa: N802
        cut = self._states[b].experts
        assert cut is not None
        cut.again()

    def _do_BN(self, b: int) -> None:  # noqa: N802
        if b == len(self._blocks):
            assert self._last is not None
            found = self._last.backward([self._grad.pop("output")])
            self._last = None
        else:
            state = self._states[b]
            assert state.non_expert is not None
            found = state.non_expert.backward([state.past, state.rows, state.weights])
            state.non_expert = state.past = state.rows = state.weights = None
        if b == 0:
            (self._grad["input"],) = found
            return
        before = self._states[b - 1]
        before.past, before.rows, before.weights = found

    def _send_BN(self, b: int) -> None:  # noqa: N802
        state = self._states[b - 1]
        if state.rows is None:
            raise RuntimeError(f"block {b - 1}: after(x, y) does not depend on y; return a value that uses it")
        _depart(state, state.combine, back=True)

    def _end_BN(self, b: int) -> None:  # noqa: N802
        _arrive(self._states[b - 1], self._states[b - 1].combine)

    def _do_BE(self, b: int) -> None:  # noqa: N802
        state, layer = self._states[b], self._blocks[b].experts
        assert state.experts is not None
        given = state.experts.inputs
        rows, *gradients = state.experts.backward([state.rows])
        # Of an expert without tokens zeros, of a rank without copies nothing.
        every = [
            torch.zeros_like(w) if g is None else g.contiguous() for w, g in zip(given[1:], gradients, strict=True)
        ]
        number = len(layer.experts.weights.given)
        state.rows, state.experts = rows, None
        state.own, state.copies = every[:number], every[number:]
        if not self._schedule.copies:
            self._hand_over(b)

    def _send_BE(self, b: int) -> None:  # noqa: N802
        _depart(self._states[b], self._states[b].dispatch, back=True)

    def _end_BE(self, b: int) -> None:  # noqa: N802
        _arrive(self._states[b], self._states[b].dispatch)


def _depart(state: _State, voyage: Voyage | None, *, back: bool = False) -> None:
    assert voyage is not None
    assert state.rows is not None
    if voyage.travels:
        voyage.start(state.rows, back=back)


def _arrive(state: _State, voyage: Voyage | None) -> None:
    assert voyage is not None
    if voyage.travels:
        state.rows = voyage.finish()
