"""Ops D, E, BF and BE on tensors: blocks that send tokens to experts between two pieces of their forward pass.

Names: h = the block's input; rows = tokens that are sent to experts or results that come back, and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import CallInputs
from oases.core.execution.executor import Place, Step
from oases.core.execution.piece import Leaves, Piece


class AllToAll(Protocol):
    """All-to-all of rows, and its reverse for their gradients; `oases.moe.dispatch` has it."""

    def begin(self, rows: Tensor, label: str, *, back: bool = False) -> None:
        """Start to send rows, or gradients back."""

    def end(self) -> Tensor:
        """Wait for what was sent to this rank."""


class Exchange(Protocol):
    """A sub-batch of a block that sends tokens to experts, made by `block.exchange(order, *values)`.

    order: hash of the schedule, which all ranks must run alike. dispatch, combine: all-to-alls to the experts' ranks
    and back, from `route` on.
    """

    dispatch: AllToAll
    combine: AllToAll

    def route(self, h: Tensor) -> tuple[Tensor, ...]:
        """Block's input -> rows to send, and tensors that the other pieces take."""

    def compute(self, rows: Tensor, *others: Tensor) -> Tensor:
        """Received rows, and what `route` returned behind its rows -> rows to send back."""

    def gather(self, h: Tensor, rows: Tensor, *others: Tensor) -> Tensor:
        """Block's input, rows that came back, and what `route` returned -> partial sum."""


@dataclass
class _State:
    """A sub-batch between its pieces. rows: what is sent next. gradients: of h, then of `others`, over their uses."""

    exchange: Exchange
    h: Tensor | None
    rows: Tensor | None = None
    others: tuple[Tensor, ...] = ()
    routed: Piece | None = None
    computed: Piece | None = None
    gradients: list[Tensor | None] = field(default_factory=list)


class ExchangeWork:
    """Tensors of one call's exchanges between ops, and the implementation of each op but F, B and BF.

    order: hash of the schedule.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], order: int, leaves: list[Leaves], inputs: CallInputs, *,
        differentiable: bool,
    ) -> None:  # fmt: skip
        self._blocks, self._order, self._leaves, self._inputs = blocks, order, leaves, inputs
        self._differentiable = differentiable
        self._states: dict[Place, _State] = {}

    def do_D(self, place: Place, h: Tensor) -> None:  # noqa: N802
        """Route a sub-batch."""
        block: Any = self._blocks[place[0]]
        exchange: Exchange = block.exchange(self._order, *self._inputs.values(*place))
        state = self._states[place] = _State(exchange, h)
        results, state.routed = self._piece(place[0], exchange.route, (h,))
        state.rows, *others = results
        state.others = tuple(others)

    def do_E(self, step: Step) -> None:  # noqa: N802
        """Run this rank's experts."""
        state = self._states[step.place]
        given = (_taken(state), *state.others)
        (state.rows,), state.computed = self._piece(
            step.block, lambda *inputs: (state.exchange.compute(*inputs),), given
        )

    def arrived(self, place: Place) -> tuple[Any, tuple[Tensor, ...]]:
        """For F: the function of the last piece, and its inputs."""
        state = self._states[place]
        h, state.h, many = state.h, None, len(state.others)
        assert h is not None
        given = (h, _taken(state), *state.others)
        gather = state.exchange.gather
        if not self._differentiable:
            del self._states[place]
        # F is called with the values of the block's methods behind its inputs; the exchange has them.
        return lambda h, rows, *rest: gather(h, rows, *rest[:many]), given

    def begin_backward(self, place: Place, gradients: Sequence[Tensor | None]) -> None:
        """For BF: the gradients of the last piece's inputs."""
        state = self._states[place]
        through, rows, *others = gradients
        assert rows is not None, "the partial sum depends on the experts"
        state.rows, state.gradients = rows, [through, *others]

    def do_BE(self, step: Step) -> None:  # noqa: N802
        """Backward pass of this rank's experts."""
        state = self._states[step.place]
        assert state.computed is not None
        piece, state.computed = state.computed, None
        rows, *others = piece.backward([_taken(state)])
        assert rows is not None, "experts depend on their tokens"
        state.rows = rows
        state.gradients[1:] = [_sum(one, other) for one, other in zip(state.gradients[1:], others, strict=True)]

    def input_gradient(self, place: Place) -> Tensor:
        """For B: the gradient of the block's input."""
        state = self._states.pop(place)
        assert state.routed is not None
        through, *others = state.gradients
        (g,) = state.routed.backward([_taken(state), *others], fresh=True)
        found = _sum(g, through)
        assert found is not None, "the router depends on its tokens"
        return found

    # --- all-to-alls ---

    def send(self, step: Step) -> None:
        """Start the all-to-all of what the carried op made."""
        state = self._states[step.place]
        exchange = state.exchange.dispatch if step.op.of in ("D", "BE") else state.exchange.combine
        exchange.begin(_taken(state), step.label, back=step.op.of in ("BF", "BE"))

    def wait(self, step: Step) -> None:
        """Wait for it."""
        state = self._states[step.place]
        state.rows = (state.exchange.dispatch if step.op.of in ("D", "BE") else state.exchange.combine).end()

    def clear(self) -> None:
        """Release every tensor."""
        self._states.clear()

    def _piece(self, block: int, function: Any, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Piece | None]:
        if not self._differentiable:
            with torch.no_grad():
                return function(*given), None
        piece = Piece([self._leaves[block], *self._inputs.leaves], False)
        results = function(*map(piece.input, given))
        return tuple(piece.output(each, False) for each in results), piece


def _taken(state: _State) -> Tensor:
    rows, state.rows = state.rows, None
    assert rows is not None
    return rows


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
