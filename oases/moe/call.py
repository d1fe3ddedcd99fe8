"""Call of an ExpertStack: the pieces, copies and gradients of its blocks, and the ops of its list on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.execution.call import ScheduledCall
from oases.core.execution.executor import Program, Step
from oases.core.execution.piece import BlockParameters, Leaves, method_of
from oases.core.schedule import Op
from oases.moe.dispatch import ExpertCounts
from oases.moe.exchange_work import Exchange, ExchangeWork, RandomStates
from oases.moe.forward import ExpertForward
from oases.moe.layer import OverlappedMoE
from oases.moe.router import Routing
from oases.moe.transfer import Transfer

_AGAIN = {"RD": "D", "RE": "E", "R": "F"}
"""Recomputed piece, by op."""
_READERS = ("D", "F", "RD", "R", "B", "BF")
_MOVES = ("share", "wait share", "join", "wait join", "split", "wait split", "return", "wait return")


class ExpertExchange(Exchange):
    """Pieces of a block, see `oases.moe.exchange_work`; and its copies, which ops of the same list send.

    tokens: of this rank in the call. copies: whether the list has ops for them. gradient_scale: factor on the
    experts' gradients.
    """

    bypasses = False
    _run: ExpertForward
    _demand: ExpertCounts | None = None
    _routing: Routing
    _shape: torch.Size
    _shapes: list[torch.Size]

    def __init__(self, block: nn.Module, tokens: int, *, copies: bool, gradient_scale: float) -> None:
        self._before, self._after = method_of(block, "before"), method_of(block, "after")
        self._layer: OverlappedMoE = block.experts  # type: ignore[assignment]
        self._setting, self.opened = self._layer.begin(tokens)
        placement, group = self._setting.placement, self._layer.process_group
        self.weights, self._transfer = self._layer.experts.weights, None
        if copies and placement.moved:
            assert group is not None, "one device has no replicas"
            self._transfer = Transfer(self.weights, placement, group, self._layer.name)
        self._gradient_scale, self._waits_for_copies = gradient_scale, copies
        self._copies: list[Tensor] = []  # parameters, then their gradients
        self.gradients: list[Tensor] = []
        """Complete gradients of the owned experts, in the order of `ExpertWeights.given`."""

    def route(self, x: Tensor) -> tuple[Tensor, ...]:
        """Block's input -> rows to send, what bypasses the routed experts, and the routing's weights."""
        layer, first = self._layer, self._demand is None
        x, h = self._before(x)
        self._shape = h.shape
        flat = h.reshape(-1, h.shape[-1])
        routing = layer.routing_of(flat, self._setting)
        counts = layer.start_counts([routing], [self._setting]) if first else None
        tokens = layer.shard_tokens(flat)
        shared = layer.shared_expert(tokens)  # queued before the host waits for the counts
        if counts is not None:
            (self._demand,) = counts()
            self._run = layer.forward_of(self._demand, self._setting.placement, x.device)
            self._run.transfer = self._transfer
            self.dispatch, self.combine = self._run.dispatch, self._run.combine
            self._routing = replace(routing, weights=routing.weights.detach())
        rows = self._run.route(tokens, routing)
        if shared is not None:  # bypasses the routed experts and is added to their results
            x = x + layer.gather_tokens(shared, len(flat)).view(h.shape)
        return rows, x, routing.weights

    def plan(self) -> None:
        """Plan the next step's placement."""
        assert self._demand is not None, "routed before"
        self._layer.observe(self._run, self._demand, self._routing, self.opened)

    def inputs(self) -> list[Tensor]:
        """Weights of the owned experts, and of the copies here, for op E."""
        found, self._copies = [*(weight.detach() for weight in self.weights.given), *self._copies], []
        self._shapes = [each.shape for each in found]
        return found

    def compute(self, rows: Tensor, *others: Tensor) -> Tensor:
        """Received rows, what `route` returned behind its rows, and `inputs` -> rows to send back."""
        _, _, *given = others
        number = len(self.weights.given)
        copies = self.weights.like(given[number:]) if given[number:] else None
        return self._run.compute(rows, self.weights.like(given[:number]), copies=copies)

    def gather(self, *given: Tensor) -> Tensor:
        """Rows that came back, and what `route` returned behind its rows -> the block's output."""
        rows, x, weights = given
        y = self._layer.gather_tokens(self._run.gather(rows, weights), self._shape[:-1].numel())
        found: Tensor = self._after(x, y.view(self._shape))
        return found

    def computed(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of `inputs`, None where no token needed one; later ops send those of copies."""
        up, number = self.weights.up, len(self.weights.given)
        every = [
            up.new_zeros(shape) if gradient is None else gradient.contiguous()
            for shape, gradient in zip(self._shapes, gradients, strict=True)
        ]
        self.gradients, self._copies = every[:number], every[number:]
        if not self._waits_for_copies:
            self._finish()

    def move(self, step: Step) -> None:
        """Run an op of the copies' parameters or gradients; see `oases.plans.expert_schedules`."""
        transfer = self._transfer
        if transfer is not None:
            if step.key == "share":
                transfer.scatter(self.weights.given)
            elif step.key == "join":
                transfer.exchange()
            elif step.key == "wait join":
                self._copies = transfer.finish()
            elif step.key == "split":
                transfer.reduce(self._copies)
                self._copies = []
            elif step.key == "return":
                transfer.gather()
            elif step.key == "wait return":
                transfer.collect(self.gradients)
        if step.key == "wait return":
            self._finish()

    def _finish(self) -> None:
        self.gradients = self._layer.summed_over_tensor_ranks(self.gradients)
        if self._gradient_scale != 1.0:
            torch._foreach_mul_(self.gradients, self._gradient_scale)


class ExpertProgram(Program):
    """Steps of an expert schedule."""

    def reads(self, op: Op) -> Sequence[int]:
        """The block of a piece besides the experts, which are never FSDP-sharded."""
        return (op.block,) if op.kind in _READERS else ()

    def makes_gradients(self, op: Op) -> Sequence[int]:
        """The block; for experts once the gradients of their copies are at the owner."""
        ends = op.kind in ("B", "BF", "BE") or (op.kind == "wait" and op.of == "return")
        return (op.block,) if ends else ()


class ExpertWork(ExchangeWork):
    """Tensors of one call between ops, and the implementation of each op of an expert schedule.

    exchanges, parameters: of each block. x: input of the call. leaves: stand-ins of each block's parameters.
    """

    def __init__(
        self, exchanges: list[ExpertExchange], program: ExpertProgram, x: Tensor, leaves: list[Leaves],
        parameters: Sequence[BlockParameters], *, differentiable: bool,
    ) -> None:  # fmt: skip
        again = differentiable and bool(program.schedule.recomputed)
        random = RandomStates(x.device) if again else None
        super().__init__(leaves, differentiable=differentiable, random=random, own_labels=True)
        self._exchanges, self._parameters = exchanges, parameters
        self._last, self._read_again = len(exchanges) - 1, [x] if again else []
        # Inputs of blocks by number, the last one the output; their gradients; and inputs that are recomputed.
        self._x: dict[int, Tensor] = {0: x}
        self._g: dict[int, Tensor] = {}
        self._recomputed: dict[int, Tensor] = {}

    def handlers(self) -> dict[str, Callable[[Step], Any]]:
        """Implementation of each op, by `Step.key`."""
        exchanges = self._exchanges
        return {
            **super().handlers(),
            "D": self._do_D, "F": self._do_F, "BF": self._do_BF,
            "E": lambda step: self.do_E(step.place, *exchanges[step.block].inputs()),
            "P": lambda step: exchanges[step.block].plan(),
            "BE": lambda step: exchanges[step.block].computed(self.do_BE(step.place)),
            "B": lambda step: self._g.update({step.block: self.gradient_of_input(step.place)}),
            **dict.fromkeys(_AGAIN, self._do_again),
            **dict.fromkeys(_MOVES, lambda step: exchanges[step.block].move(step)),
        }  # fmt: skip

    def output(self) -> Tensor:
        """Output of the last block."""
        for exchange in self._exchanges:
            if exchange.opened is not None:
                exchange.opened.done = True
        return self._x.pop(self._last + 1)

    def versions(self) -> list[int]:
        """Version of the input, which a recomputation reads."""
        return [x._version for x in self._read_again]

    def begin_backward(self, grad: Tensor) -> None:
        """Set the gradient of the output."""
        for exchange in self._exchanges:
            if exchange.opened is not None:
                exchange.opened.closed = True
        self._g[self._last + 1] = grad

    def input_gradient(self) -> Tensor:
        """Gradient of the input."""
        return self._g.pop(0)

    def gradients_of(self, block: int) -> list[Tensor | None]:
        """Complete gradients of a block, by parameter index."""
        found: list[Tensor | None] = self.leaves[block].take(False)
        exchange, numbers = self._exchanges[block], map(id, self._parameters[block].parameters)
        places = {each: number for number, each in enumerate(numbers)}
        for weight, gradient in zip(exchange.weights.given, exchange.gradients, strict=True):
            found[places[id(weight)]] = gradient
        exchange.gradients = []
        return found

    def forget(self) -> None:
        """Release every tensor."""
        self.clear()
        for held in (self._exchanges, self._x, self._g, self._recomputed, self._read_again, self.leaves):
            held.clear()  # type: ignore[attr-defined]

    def _do_D(self, step: Step) -> None:  # noqa: N802
        block = step.block
        self.do_D(step.place, self._exchanges[block], self._x.pop(block), recomputed=block > 0)

    def _do_F(self, step: Step) -> None:  # noqa: N802
        gather, given = self.arrived(step.place)
        (self._x[step.block + 1],) = self.run("F", step.place, lambda *given: (gather(*given),), given)

    def _do_again(self, step: Step) -> None:
        kind, block = _AGAIN[step.key], step.block
        given = (self._recomputed.pop(block),) if kind == "D" and block else None
        results = self.run_again(kind, step.place, given)
        if kind == "D" and not block:
            self._read_again.clear()
        if kind == "F" and block < self._last:
            (self._recomputed[block + 1],) = results

    def _do_BF(self, step: Step) -> None:  # noqa: N802
        self.gathered_backward(step.place, self.backward("F", step.place, self._g.pop(step.block + 1)))


class ExpertCall(ScheduledCall):
    """Call of an ExpertStack; used by its autograd nodes and by a pipeline."""

    _work: ExpertWork

    def finish_block(self, block: int) -> list[Tensor | None]:
        """Run to the end of `block`; return the gradients of `block_tensors(block)`."""
        with self._together():
            self._run_to(self._ends[block])
            gradients = self._work.gradients_of(block)
            return [gradients[number] for number in self._parameters[block].trained]

    def defer_weights(self) -> None:
        """Nothing: expert schedules have no W op."""

    def compute_weights(self) -> None:
        """Nothing: no weight gradient was deferred."""
