"""One forward pass of experts, for layers, stacks of them and unedited models: route, experts, combine.

`route` gives the rows that the all-to-all `dispatch` sends, `compute` those that the all-to-all `combine` sends back,
`gather` the weighted sums. A schedule runs the three and the all-to-alls as ops of its own; `through` runs them one
after another. Copies of experts are sent by autograd nodes (`send_copies`), or given to `compute` by a schedule that
has ops for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from oases.core.execution.communication import WireType
from oases.core.execution.group import ProcessGroup, group_rank
from oases.moe.dispatch import AllToAll, by_token, dispatch_plan, permuted, reordered, wire_bytes
from oases.moe.experts import ExpertWeights
from oases.moe.placement import Integers, Placement
from oases.moe.router import Routing
from oases.moe.transfer import Transfer, tie

Run = Callable[[Tensor, list[int], ExpertWeights], Tensor]
"""Function of the experts: rows, rows of each expert, their weights -> rows, as `oases.moe.experts.compute`."""
_T = TypeVar("_T")


class ExpertForward:
    """Forward pass of this rank's tokens, whose counts [expert, device] are known, under a placement.

    label: name of the layer in the labels of collectives. wire: type in which tokens are sent, see `AllToAll`.
    token_bytes: bytes that this rank sends to others in dispatch and combine, from `route` on.
    """

    token_bytes: int

    def __init__(
        self, run: Run, group: ProcessGroup | None, counts: Integers, placement: Placement, device: torch.device,
        label: str, wire: WireType | None = None,
    ) -> None:  # fmt: skip
        self._run, self._group, self.placement, self._label, self._wire = run, group, placement, label, wire
        self.plan = plan = dispatch_plan(counts, placement, group_rank(group), device)
        self.dispatch = AllToAll(group, plan.sent, plan.received, f"dispatch of {label}", wire)
        self.combine = AllToAll(group, plan.received, plan.sent, f"combine of {label}", wire)
        self.transfer: Transfer | None = None
        """Transfer of the copies, if there are any: set by `send_copies`, or by a schedule with ops for them."""

    def send_copies(self, own: ExpertWeights) -> list[Tensor]:
        """Start to send copies of owned experts; returns what `compute` takes last."""
        if not self.placement.moved:
            return []
        assert self._group is not None, "one device has no replicas"
        self.transfer = Transfer(own, self.placement, self._group, self._label)
        return [self.transfer.send(own)]

    def route(self, tokens: Tensor, routing: Routing) -> Tensor:
        """[T, hidden] -> rows to send, by the rank that computes them and by expert."""
        rows, self._source = permuted(tokens, routing, self.plan)
        lengths = zip(self.plan.sent, self.plan.received, strict=True)
        others = sum(sum(each) for rank, each in enumerate(lengths) if rank != group_rank(self._group))
        self.token_bytes = round(others * rows.shape[1] * wire_bytes(rows.dtype, self._wire))
        return rows

    def compute(
        self, rows: Tensor, own: ExpertWeights, *pending: Tensor, copies: ExpertWeights | None = None
    ) -> Tensor:
        """Received rows -> rows to send back. pending: of `send_copies`, in place of copies."""
        plan, number = self.plan, None
        here, others = plan.rows[: plan.own], plan.rows[plan.own :]
        rows = at_home = reordered(rows, plan.order, plan.inverse)
        if others:
            at_home, copied = rows.split([sum(here), sum(others)])
        made = self._run(at_home, here, own)
        if pending:
            assert self.transfer is not None
            copies, number = self.transfer.receive(*pending)
        if others:
            assert copies is not None
            made = torch.cat([made, self._run(copied, others, copies)])
        return reordered(made if number is None else tie(made, number), plan.inverse, plan.order)

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Rows that came back and the routing's weights [T, k] -> weighted sums [T, hidden]; a dropped slot is 0."""
        return by_token(rows, self._source, weights)

    def through(
        self, tokens: Tensor, routing: Routing, own: ExpertWeights, meanwhile: Callable[[], _T]
    ) -> tuple[Tensor, _T]:
        """All of it: the weighted sums, and the result of `meanwhile`, which runs while the tokens travel."""
        copies = self.send_copies(own)
        pending = self.dispatch.send(self.route(tokens, routing))
        result = meanwhile()
        rows = self.compute(self.dispatch.receive(pending), own, *copies)
        rows = self.combine.receive(self.combine.send(rows))
        return self.gather(rows, routing.weights), result
