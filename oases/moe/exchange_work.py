"""Ops D, E, BF and BE on tensors: blocks that send tokens to experts between two pieces of their forward pass.

Names: h = the block's input; rows = tokens that are sent to experts or results that come back, and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from oases.core.blocks.randomness import default_generators, restore
from oases.core.execution.executor import Place, Step
from oases.core.execution.piece import Leaves, Piece
from oases.extension import generator_mark
from oases.moe.dispatch import AllToAll

Tensors = tuple[Tensor, ...]
_SENT = ("D", "E", "BF", "BE")


class Exchange(Protocol):
    """A sub-batch of a block that sends tokens to experts.

    dispatch, combine: all-to-alls to the experts' ranks and back, from `route` on. bypasses: whether `gather` reads
    the block's input, too, before the rows.
    """

    bypasses: bool
    dispatch: AllToAll
    combine: AllToAll

    def route(self, h: Tensor) -> Tensors:
        """Block's input -> rows to send, and tensors that the other pieces take."""

    def compute(self, rows: Tensor, *others: Tensor) -> Tensor:
        """Received rows, what `route` returned behind its rows, and what op E is given -> rows to send back."""

    def gather(self, *given: Tensor) -> Tensor:
        """Rows that came back, and what `route` returned behind its rows -> partial sum, or the block's output."""

    def sent(self) -> None:
        """Called once the rows for the experts are under way."""
        return

    def together(self) -> AbstractContextManager[object]:
        """Context of an all-to-all, which may raise its failure on every rank of a group of its own."""
        return nullcontext()


class RandomStates:
    """Random states at the start of pieces, for recomputation; copied only after something has drawn."""

    def __init__(self, device: torch.device) -> None:
        self._generators = default_generators(device)
        self._states: list[Tensor] = []
        self._marks: list[int] | None = None

    def now(self) -> list[Tensor]:
        """States of all generators."""
        marks = [generator_mark(generator) for generator in self._generators]
        if marks != self._marks:
            self._marks, self._states = marks, [generator.get_state() for generator in self._generators]
        return self._states

    def replayed(self, states: list[Tensor], function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Call `function` with random numbers drawn from these states; the current states are restored."""
        kept = [generator.get_state() for generator in self._generators]
        restore(self._generators, states)
        try:
            return function()
        finally:
            restore(self._generators, kept)


@dataclass(eq=False)
class _State:
    """A sub-batch between its pieces. rows: what is sent next. gradients: of h, then of `others`, over their uses."""

    exchange: Exchange
    h: Tensor | None
    rows: Tensor | None = None
    others: Tensors = ()
    gradients: list[Tensor | None] = field(default_factory=list)


@dataclass(eq=False)
class _Again:
    """A piece that is recomputed. random: None where nothing was drawn."""

    function: Callable[..., Tensors]
    inputs: Tensors
    random: list[Tensor] | None


class ExchangeWork:
    """Tensors of one call's exchanges between ops, and the implementation of each op but F, B and BF.

    What `BlockWork` asks a block's `token_work` for.

    leaves: stand-ins of each block's parameters; more: of all blocks' inputs. random: states of generators, where
    pieces are recomputed. own_labels: all-to-alls have their own labels instead of the ops'.
    """

    def __init__(
        self, leaves: list[Leaves], more: Sequence[Leaves] = (), *, differentiable: bool,
        random: RandomStates | None = None, own_labels: bool = False,
    ) -> None:  # fmt: skip
        self.leaves, self._more = leaves, more
        self._differentiable, self._random, self._own_labels = differentiable, random, own_labels
        self._states: dict[Place, _State] = {}
        self._pieces: dict[tuple[str, Place], Piece] = {}
        self._again: dict[tuple[str, Place], _Again] = {}

    def do_D(self, place: Place, exchange: Exchange, h: Tensor, *, recomputed: bool = False) -> None:  # noqa: N802
        """Route a sub-batch. recomputed: h is recomputed before this piece is, and not kept."""
        state = self._states[place] = _State(exchange, h if exchange.bypasses else None)
        state.rows, *others = self.run("D", place, exchange.route, (h,))
        state.others = tuple(others)
        if recomputed and ("D", place) in self._again:
            self._again["D", place].inputs = ()

    def do_E(self, place: Place, *more: Tensor) -> None:  # noqa: N802
        """Run this rank's experts. more: further inputs of `compute`."""
        state = self._states[place]
        compute = state.exchange.compute
        (state.rows,) = self.run("E", place, lambda *given: (compute(*given),), (_taken(state), *state.others, *more))

    def arrived(self, place: Place) -> tuple[Any, Tensors]:
        """For F: the function of the last piece, and its inputs."""
        state = self._states[place]
        given = (_taken(state), *state.others)
        if state.exchange.bypasses:
            assert state.h is not None
            given, state.h = (state.h, *given), None
        gather, many = state.exchange.gather, len(given)
        if not self._differentiable:
            del self._states[place]
        # F is called with the values of the block's methods behind its inputs; the exchange has them.
        return lambda *given: gather(*given[:many]), given

    def gathered_backward(self, place: Place, gradients: Sequence[Tensor | None]) -> None:
        """For BF: the gradients of the last piece's inputs."""
        state = self._states[place]
        through, rows, *others = gradients if state.exchange.bypasses else (None, *gradients)
        if rows is None:
            raise RuntimeError(
                f"block {place[0]}: its output does not depend on the experts' results; return a value that uses them"
            )
        state.rows, state.gradients = rows, [through, *others]

    def do_BE(self, place: Place) -> list[Tensor | None]:  # noqa: N802
        """Backward pass of this rank's experts; returns the gradients of the further inputs of E."""
        state = self._states[place]
        rows, *others = self.backward("E", place, _taken(state))
        assert rows is not None, "experts depend on their tokens"
        state.rows = rows
        known = state.gradients[1:]
        state.gradients[1:] = [_sum(one, other) for one, other in zip(known, others, strict=False)]
        return others[len(known) :]

    def gradient_of_input(self, place: Place) -> Tensor:
        """For B: the gradient of the block's input."""
        state = self._states.pop(place)
        through, *others = state.gradients
        (g,) = self._pieces.pop(("D", place)).backward([_taken(state), *others], fresh=True)
        found = _sum(g, through)
        assert found is not None, "the router depends on its tokens"
        return found

    def handlers(self) -> dict[str, Callable[[Step], Any]]:
        """Implementation of the ops that depend on no others' tensors, by `Step.key`."""
        return {
            "E": lambda step: self.do_E(step.place), "BE": lambda step: self.do_BE(step.place),
            **{f"all_to_all {kind}": self.send for kind in _SENT}, **{f"wait {kind}": self.wait for kind in _SENT},
        }  # fmt: skip

    # --- all-to-alls ---

    def send(self, step: Step) -> None:
        """Start the all-to-all of what the carried op made."""
        state, of = self._states[step.place], step.op.of
        exchange, label = state.exchange, "" if self._own_labels else step.label
        with exchange.together():
            through = exchange.dispatch if of in ("D", "BE") else exchange.combine
            through.start(_taken(state), back=of in ("BF", "BE"), label=label)
            if of == "D":
                exchange.sent()

    def wait(self, step: Step) -> None:
        """Wait for it."""
        state = self._states[step.place]
        exchange = state.exchange
        with exchange.together():
            state.rows = (exchange.dispatch if step.op.of in ("D", "BE") else exchange.combine).finish()

    def clear(self) -> None:
        """Release every tensor."""
        for held in (self._states, self._pieces, self._again):
            held.clear()

    # --- pieces ---

    def run(self, kind: str, place: Place, function: Callable[..., Tensors], given: Tensors) -> Tensors:
        """Run a piece; without a graph where it is recomputed later, or where no gradients are needed."""
        if not self._differentiable:
            with torch.no_grad():
                return function(*given)
        if self._random is None:
            return self._recorded(kind, place, function, given)
        states, before = self._random.now(), self._random.now()
        with torch.no_grad():
            results = function(*given)
        drawn = states if self._random.now() is not before else None
        self._again[kind, place] = _Again(function, given, drawn)
        return tuple(each.detach() for each in results)

    def run_again(self, kind: str, place: Place, given: Tensors | None = None) -> Tensors:
        """Run a piece again, now with its graph. given: inputs, where they have been recomputed."""
        assert self._random is not None
        run = self._again.pop((kind, place))
        inputs = run.inputs if given is None else given
        if run.random is None:
            return self._recorded(kind, place, run.function, inputs)
        return self._random.replayed(run.random, lambda: self._recorded(kind, place, run.function, inputs))

    def backward(self, kind: str, place: Place, gradient: Tensor) -> list[Tensor | None]:
        """Backward pass of a piece with one result: the gradients of its inputs."""
        found: list[Tensor | None] = self._pieces.pop((kind, place)).backward([gradient])
        return found

    def _recorded(self, kind: str, place: Place, function: Callable[..., Tensors], given: Tensors) -> Tensors:
        piece = self._pieces[kind, place] = Piece([self.leaves[place[0]], *self._more], False)
        results = function(*map(piece.input, given))
        return tuple(piece.output(each, False) for each in results)


def _taken(state: _State) -> Tensor:
    rows, state.rows = state.rows, None
    assert rows is not None
    return rows


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
