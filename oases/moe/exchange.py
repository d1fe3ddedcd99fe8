"""A block of experts in a stack's call: its pieces, the copies of its experts, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from oases.core.execution.piece import method_of
from oases.moe.dispatch import AllToAll, ExpertCounts
from oases.moe.forward import ExpertForward
from oases.moe.layer import OverlappedMoE
from oases.moe.router import Routing
from oases.moe.transfer import Transfer


class ExpertBlock(Protocol):
    """Block of an ExpertStack: layers before the experts and after them.

    before(x) -> (x, h): h is the input of the experts; x bypasses them. after(x, y) -> the block's output, y the
    experts' output for h. Shapes: [..., hidden], y as h.
    """

    experts: OverlappedMoE

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See above."""

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """See above."""


class ExpertExchange:
    """Pieces of a block, see `oases.moe.exchange_work`; and its copies, which ops of the same list send.

    tokens: of this rank in the call. copies: whether the list has ops for them. gradient_scale: factor on the
    experts' gradients.
    """

    bypasses = False
    _shape: torch.Size
    _shapes: list[torch.Size]
    _routing: Routing

    def __init__(self, block: nn.Module, tokens: int, *, copies: bool, gradient_scale: float) -> None:
        self._before, self._after = method_of(block, "before"), method_of(block, "after")
        self._layer: OverlappedMoE = block.experts  # type: ignore[assignment]
        self._setting, self.opened = self._layer.begin(tokens)
        placement, group = self._setting.placement, self._layer.process_group
        self._transfer: Transfer | None = None
        if copies and placement.moved:
            assert group is not None, "one device has no replicas"
            self._transfer = Transfer(self._layer.experts.weights, placement, group, self._layer.name)
        self._gradient_scale, self._waits_for_copies = gradient_scale, copies
        self._demand: ExpertCounts | None = None
        self._forward: ExpertForward | None = None
        self._copies: list[Tensor] = []  # parameters, then their gradients
        self.gradients: list[Tensor] = []
        """Complete gradients of the owned experts, in the order of `ExpertWeights.given`."""

    # --- tokens ---

    @property
    def run(self) -> ExpertForward:
        """The forward pass, from `route` on."""
        assert self._forward is not None, "routed before"
        return self._forward

    @property
    def dispatch(self) -> AllToAll:
        """See `Exchange`."""
        return self.run.dispatch

    @property
    def combine(self) -> AllToAll:
        """See `Exchange`."""
        return self.run.combine

    def route(self, x: Tensor) -> tuple[Tensor, ...]:
        """Block's input -> rows to send, what bypasses the routed experts, and the routing's weights."""
        layer = self._layer
        x, h = self._before(x)
        self._shape = h.shape
        flat = h.reshape(-1, h.shape[-1])
        routing, counts = layer.routed(flat, self._setting, self._demand)
        tokens = layer.shard_tokens(flat)
        shared = layer.shared_expert(tokens)  # queued before the host waits for the counts
        if self._demand is None:
            self._demand = counts()
            self._forward = layer.forward_of(self._demand, self._setting.placement, x.device)
            self._routing = replace(routing, weights=routing.weights.detach())
        rows = self.run.route(tokens, routing)
        if shared is not None:  # bypasses the routed experts and is added to their results
            x = x + layer.gather_tokens(shared, len(flat)).view(h.shape)
        return rows, x, routing.weights

    def compute(self, rows: Tensor, *others: Tensor) -> Tensor:
        """Received rows, what `route` returned behind its rows, and `inputs` -> rows to send back."""
        _, _, *given = others
        form = self._layer.experts.weights
        number = len(form.given)
        copies = form.like(given[number:]) if given[number:] else None
        return self.run.compute(rows, form.like(given[:number]), copies=copies)

    def gather(self, *given: Tensor) -> Tensor:
        """Rows that came back, and what `route` returned behind its rows -> the block's output."""
        rows, x, weights = given
        y = self._layer.gather_tokens(self.run.gather(rows, weights), self._shape[:-1].numel())
        found: Tensor = self._after(x, y.view(self._shape))
        return found

    def plan(self) -> None:
        """Plan the next step's placement."""
        if self.opened is not None:
            assert self._demand is not None
            sent = 0 if self._transfer is None else self._transfer.bytes
            self._layer.observe(self.opened, self._demand, self._routing, self.run.plan, sent)

    # --- experts ---

    def inputs(self) -> list[Tensor]:
        """Weights of the owned experts, and of the copies here, for op E."""
        own = [weight.detach() for weight in self._layer.experts.weights.given]
        found, self._copies = [*own, *self._copies], []
        self._shapes = [each.shape for each in found]
        return found

    def computed(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of `inputs`, None where no token needed one; later ops send those of copies."""
        up, number = self._layer.experts.up, len(self._layer.experts.weights.given)
        every = [
            up.new_zeros(shape) if gradient is None else gradient.contiguous()
            for shape, gradient in zip(self._shapes, gradients, strict=True)
        ]
        self.gradients, self._copies = every[:number], every[number:]
        if not self._waits_for_copies:
            self._finish()

    def share(self) -> None:
        """Send the first half of the copies' parameters, from the owners."""
        if self._transfer is not None:
            self._transfer.scatter(self._layer.experts.weights.given)

    def join(self) -> None:
        """Send the second half, among the ranks with copies."""
        if self._transfer is not None:
            self._transfer.exchange()

    def joined(self) -> None:
        """Wait for it."""
        if self._transfer is not None:
            self._copies = self._transfer.finish()

    def split(self) -> None:
        """Send gradients among the ranks with copies."""
        if self._transfer is not None:
            self._transfer.reduce(self._copies)
            self._copies = []

    def give_back(self) -> None:
        """Send their sums to the owners."""
        if self._transfer is not None:
            self._transfer.gather()

    def given_back(self) -> None:
        """Wait for these, and finish the gradients of the owned experts."""
        if self._transfer is not None:
            self._transfer.collect(self.gradients)
        self._finish()

    def _finish(self) -> None:
        self.gradients = self._layer.summed_over_tensor_ranks(self.gradients)
        if self._gradient_scale != 1.0:
            torch._foreach_mul_(self.gradients, self._gradient_scale)
