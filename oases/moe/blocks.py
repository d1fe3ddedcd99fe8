"""Ops of blocks of experts on tensors: N, E, P, RN, RE, BN and BE, and their transfers.

N b and E b are pieces of the autograd graph, so the backward pass runs in schedule order instead of autograd's, and
transfers start and end where the schedule has them. Names as in `oases.core.schedule.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from oases.core.execution.executor import Step
from oases.core.execution.group import ProcessGroup
from oases.core.execution.piece import Leaves, Piece, RandomStates, method_of
from oases.moe.dispatch import AllToAll, ExpertCounts
from oases.moe.forward import ExpertForward
from oases.moe.layer import OverlappedMoE
from oases.moe.program import ExpertParameters, ExpertProgram
from oases.moe.recomputation import ForwardPass, RoutingState
from oases.moe.router import Routing
from oases.moe.transfer import Transfer

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(eq=False)
class _Run:
    """One N or E of the pass: its piece, or all that is needed to record it. random: None where nothing was drawn."""

    function: Function
    inputs: tuple[Tensor, ...]
    leaves: list[Leaves]
    shapes: list[torch.Size]
    piece: Piece | None = None
    random: list[Tensor] | None = None


@dataclass(eq=False)
class _State:
    """State of a block during a pass."""

    setting: RoutingState
    opened: ForwardPass | None
    routing: Routing | None = None
    demand: ExpertCounts | None = None
    forward: ExpertForward | None = None
    shape: torch.Size | None = None
    transfer: Transfer | None = None
    copies: list[Tensor] | None = None
    own: list[Tensor] | None = None
    # Activations, then their gradients: residual, routing weights, tokens or expert results.
    between: list[Tensor | None] = field(default_factory=list)


class ExpertWork:
    """Tensors of one call between ops, and the implementation of each op.

    leaves: the stand-ins of each block's parameters. gradient_scale: factor on the experts' gradients, which at the
    owner are the sum over all tokens of the group.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], program: ExpertProgram, group: ProcessGroup | None, x: Tensor,
        leaves: list[Leaves], parameters: Sequence[ExpertParameters], *, differentiable: bool, gradient_scale: float,
    ) -> None:  # fmt: skip
        self._program, self._group, self._differentiable = program, group, differentiable
        self._recompute = program.schedule.recompute != "none" and differentiable
        self._gradient_scale = gradient_scale
        self._before = [method_of(block, "before") for block in blocks]
        self._after = [method_of(block, "after") for block in blocks]
        self._layers: list[OverlappedMoE] = [block.experts for block in blocks]  # type: ignore[misc]
        self._last = len(blocks)
        self.leaves, self._parameters = leaves, parameters
        self._random = RandomStates(x.device)
        tokens = x.numel() // x.shape[-1]
        self._states = [_State(*layer.begin(tokens)) for layer in self._layers]
        for layer, state in zip(self._layers, self._states, strict=True):
            if program.schedule.copies and state.setting.placement.moved:
                assert group is not None, "one device has no replicas"
                state.transfer = Transfer(layer.experts.weights, state.setting.placement, group, layer.name)
        self._runs: dict[tuple[str, int], _Run] = {}
        self._ends: list[Tensor | None] = [x]
        """The input, then the output, the output gradient and the input gradient."""
        self._gradients: dict[int, list[Tensor]] = {}  # of experts, by block

    def handlers(self) -> dict[str, Callable[[Step], None]]:
        """Implementation of each op, by `Step.key`."""
        return {
            "N": self._do_N, "E": self._do_E, "P": self._do_P, "RN": self._again, "RE": self._again,
            "BN": self._do_BN, "BE": self._do_BE,
            "all_to_all N": self._send_N, "wait N": self._wait_dispatch, "all_to_all E": self._send_E,
            "wait E": self._wait_combine, "all_to_all BN": self._send_BN, "wait BN": self._wait_combine,
            "all_to_all BE": self._send_BE, "wait BE": self._wait_dispatch,
            "share": self._share, "wait share": _arrives_later, "join": self._join, "wait join": self._wait_join,
            "split": self._split, "wait split": _arrives_later, "return": self._return,
            "wait return": self._wait_return,
        }  # fmt: skip

    def output(self) -> Tensor:
        """Output of the last block."""
        for state in self._states:
            if state.opened is not None:
                state.opened.done = True
        (output,) = self._ends
        assert output is not None
        self._ends = []
        return output

    def versions(self) -> list[int]:
        """Version of the input, which a recomputation reads."""
        run = self._runs.get(("N", 0))
        return [] if run is None else [each._version for each in run.inputs]

    def begin_backward(self, grad: Tensor) -> None:
        """Set the gradient of the output."""
        for state in self._states:
            if state.opened is not None:
                state.opened.closed = True
        self._ends = [grad]

    def input_gradient(self) -> Tensor | None:
        """Gradient of the input."""
        (grad,) = self._ends
        return grad

    def gradients_of(self, block: int) -> list[Tensor | None]:
        """Complete gradients of a block, by parameter index."""
        found = self.leaves[block].take(False)
        for number, gradient in zip(self._parameters[block].experts, self._gradients.pop(block), strict=True):
            found[number] = gradient
        return found

    def forget(self) -> None:
        """Release every tensor."""
        for held in (self._states, self._runs, self._ends, self._gradients, self.leaves):
            held.clear()

    # --- pieces ---

    def _run(
        self, kind: str, block: int, function: Function, inputs: Sequence[Tensor | None], around: range
    ) -> tuple[Tensor, ...]:
        """Run an N or an E; without a graph where it is recomputed later or no gradients are needed.

        around: the blocks whose parameters it reads.
        """
        given = tuple(each for each in inputs if each is not None)
        if not self._differentiable:
            return function(*given)
        leaves = [self.leaves[number] for number in around if 0 <= number < self._last]
        run = self._runs[kind, block] = _Run(function, given, leaves, [each.shape for each in given])
        if not self._recompute:
            return self._recorded(run)
        states, before = self._random.now(), self._random.now()
        with torch.no_grad():
            results = function(*given)
        run.random = states if self._random.now() is not before else None
        return tuple(each.detach() for each in results)

    def _recorded(self, run: _Run) -> tuple[Tensor, ...]:
        run.piece = Piece(run.leaves)
        results = run.function(*map(run.piece.input, run.inputs))
        run.inputs = ()
        return tuple(run.piece.output(each) for each in results)

    def _again(self, step: Step) -> None:
        run = self._runs[step.key[1:], step.block]
        if run.random is None:
            self._recorded(run)
        else:
            self._random.replayed(run.random, lambda: self._recorded(run))

    def _backward(self, kind: str, block: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        piece = self._runs.pop((kind, block)).piece
        assert piece is not None, "recomputed before"
        found: list[Tensor | None] = piece.backward(list(gradients))
        return found

    # --- forward ---

    def _do_N(self, step: Step) -> None:  # noqa: N802
        b = step.block
        inputs, held = self._ends, b
        if b:
            before = self._states[b - 1]
            inputs, before.between = before.between, []
        results = self._run("N", b, lambda *given: self._non_expert(held, *given), inputs, range(b - 1, b + 1))
        if b == self._last:
            self._ends = list(results)
        else:
            self._ends = []
            self._states[b].between = list(results)

    def _non_expert(self, b: int, *given: Tensor) -> tuple[Tensor, ...]:
        x = self._behind(b - 1, *given) if b else given[0]
        if b == self._last:
            return (x,)
        state, layer = self._states[b], self._layers[b]
        x, h = self._before[b](x)
        state.shape = h.shape
        flat = h.reshape(-1, h.shape[-1])
        routing, counts = layer.routed(flat, state.setting, state.demand)
        tokens = layer.shard_tokens(flat)
        shared = layer.shared_expert(tokens)  # queued before the host waits for the counts
        if state.demand is None:
            state.demand = counts()
            state.forward = ExpertForward(
                layer.compute, self._group, state.demand.counts, state.setting.placement, x.device, layer.name,
                layer.wire_dtype,
            )  # fmt: skip
        rows = _forward(state).route(tokens, routing)
        state.routing = replace(routing, weights=routing.weights.detach())
        if shared is not None:  # bypasses the routed experts and is added to their results
            x = x + layer.gather_tokens(shared, len(flat)).view(h.shape)
        return x, routing.weights, rows

    def _behind(self, b: int, x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        state = self._states[b]
        assert state.shape is not None
        y = _forward(state).gather(rows, weights)
        found: Tensor = self._after[b](
            x, self._layers[b].gather_tokens(y, state.shape[:-1].numel()).view(state.shape)
        )
        return found

    def _do_P(self, step: Step) -> None:  # noqa: N802
        state = self._states[step.block]
        assert state.demand is not None
        assert state.routing is not None
        if state.opened is not None:
            sent = 0 if state.transfer is None else state.transfer.bytes
            plan = _forward(state).plan
            self._layers[step.block].observe(state.opened, state.demand, state.routing, plan, sent)

    def _do_E(self, step: Step) -> None:  # noqa: N802
        b = step.block
        state = self._states[b]
        rows = state.between.pop()
        own = [weight.detach() for weight in self._layers[b].experts.weights.given]
        inputs = [rows, *own, *(state.copies or [])]
        state.between += self._run("E", b, lambda *given: self._experts(b, *given), inputs, range(0))
        state.copies = None

    def _experts(self, b: int, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        form = self._layers[b].experts.weights
        number = len(form.given)
        copies = form.like(weights[number:]) if weights[number:] else None
        return (_forward(self._states[b]).compute(rows, form.like(weights[:number]), copies=copies),)

    # --- replicas ---

    def _share(self, step: Step) -> None:
        transfer = self._states[step.block].transfer
        if transfer is not None:
            transfer.scatter(self._layers[step.block].experts.weights.given)

    def _join(self, step: Step) -> None:
        transfer = self._states[step.block].transfer
        if transfer is not None:
            transfer.exchange()

    def _wait_join(self, step: Step) -> None:
        state = self._states[step.block]
        if state.transfer is not None:
            state.copies = state.transfer.finish()

    def _split(self, step: Step) -> None:
        state = self._states[step.block]
        if state.transfer is not None:
            assert state.copies is not None
            state.transfer.reduce(state.copies)
            state.copies = None

    def _return(self, step: Step) -> None:
        transfer = self._states[step.block].transfer
        if transfer is not None:
            transfer.gather()

    def _wait_return(self, step: Step) -> None:
        state = self._states[step.block]
        assert state.own is not None
        if state.transfer is not None:
            state.transfer.collect(state.own)
        self._whole(step.block)

    def _whole(self, b: int) -> None:
        """Finish the gradients of the experts owned by this rank."""
        state = self._states[b]
        assert state.own is not None
        gradients, state.own = self._layers[b].summed_over_tensor_ranks(state.own), None
        if self._gradient_scale != 1.0:
            torch._foreach_mul_(gradients, self._gradient_scale)
        self._gradients[b] = gradients

    # --- backward ---

    def _do_BN(self, step: Step) -> None:  # noqa: N802
        b = step.block
        gradients = self._ends if b == self._last else self._states[b].between
        found = self._backward("N", b, gradients)
        if b < self._last:
            self._states[b].between = []
        if b == 0:
            self._ends = found
            return
        self._ends = []
        self._states[b - 1].between = found

    def _do_BE(self, step: Step) -> None:  # noqa: N802
        b = step.block
        state, form, (_, *shapes) = self._states[b], self._layers[b].experts.weights, self._runs["E", b].shapes
        rows, *gradients = self._backward("E", b, [state.between.pop()])
        state.between.append(rows)
        # Zeros for an expert without tokens; nothing on a rank without replicas.
        every = [
            form.up.new_zeros(shape) if gradient is None else gradient.contiguous()
            for shape, gradient in zip(shapes, gradients, strict=True)
        ]
        number = len(form.given)
        state.own, state.copies = every[:number], every[number:]
        if not self._program.schedule.copies:
            self._whole(b)

    # --- tokens: dispatched after N and combined after E, gradients in reverse ---

    def _send_N(self, step: Step) -> None:  # noqa: N802
        state = self._states[step.block]
        _send(state, _forward(state).dispatch)

    def _send_E(self, step: Step) -> None:  # noqa: N802
        state = self._states[step.block]
        _send(state, _forward(state).combine)

    def _send_BN(self, step: Step) -> None:  # noqa: N802
        state = self._states[step.block - 1]
        if state.between[-1] is None:
            raise RuntimeError(
                f"block {step.block - 1}: after(x, y) does not depend on y; return a value that uses it"
            )
        _send(state, _forward(state).combine, back=True)

    def _send_BE(self, step: Step) -> None:  # noqa: N802
        state = self._states[step.block]
        _send(state, _forward(state).dispatch, back=True)

    def _wait_dispatch(self, step: Step) -> None:
        state = self._states[step.block]
        _receive(state, _forward(state).dispatch)

    def _wait_combine(self, step: Step) -> None:
        # BN b sends the gradients of the previous block's results.
        state = self._states[step.block - (step.op.of == "BN")]
        _receive(state, _forward(state).combine)


def _arrives_later(step: Step) -> None:
    """Nothing: the op that forwards this result waits for it."""


def _forward(state: _State) -> ExpertForward:
    assert state.forward is not None, "routed before"
    return state.forward


def _send(state: _State, exchange: AllToAll, *, back: bool = False) -> None:
    rows = state.between[-1]
    assert rows is not None
    if exchange.travels:
        exchange.start(rows, back=back)


def _receive(state: _State, exchange: AllToAll) -> None:
    if exchange.travels:
        state.between[-1] = exchange.finish()
