"""What a stack puts on the wire: the collectives of a schedule, by op, in their layout and type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from oases.schedule import Op, Schedule


class Scheduler(Protocol):
    """What a wire asks of its collectives; `oases._C.OverlapScheduler` is the real one."""

    def all_reduce(self, tensor: Tensor, label: str = "") -> Any:
        """Start summing `tensor` over the ranks in place; return a ticket."""

    def reduce_scatter(self, output: Tensor, input: Tensor, label: str = "") -> Any:
        """Start summing `input` [ranks, ...] over the ranks, this rank's part into `output`; return a ticket."""

    def all_gather(self, output: Tensor, input: Tensor, label: str = "") -> Any:
        """Start joining every rank's `input` into `output` [ranks, ...]; return a ticket."""

    def all_to_all(self, output: Tensor, input: Tensor, sent: list[int], received: list[int], label: str = "") -> Any:
        """Start sending each rank its rows of `input`; `output` gets theirs, in rank order; return a ticket."""

    def wait(self, ticket: Any) -> None:
        """Return once the ticket's result may be used."""


class Silence:
    """A scheduler that sends nothing: what computes alone, for a group of one and for benchmarks.

    pretends: let the stack make all the buffers of sums that would be sent, those of replicated gradients too, for a
    step whose memory is measured. (Gloo's threads hold tensors besides, now and then for longer than anybody else.)
    """

    def __init__(self, *, pretends: bool = False) -> None:
        self.pretends = pretends

    def all_reduce(self, tensor: Tensor, label: str = "") -> None:
        """Leave `tensor` as it is."""

    def reduce_scatter(self, output: Tensor, input: Tensor, label: str = "") -> None:
        """Take some part for the sum."""
        output.copy_(input[0])

    def all_gather(self, output: Tensor, input: Tensor, label: str = "") -> None:
        """Take `input` for every rank's."""
        output.copy_(input.expand_as(output))

    def all_to_all(
        self, output: Tensor, input: Tensor, sent: list[int], received: list[int], label: str = ""
    ) -> None:
        """Take rows of `input` for the others', as far as there are any, and zeros beyond."""
        rows = min(len(output), len(input))
        output.zero_()[:rows].copy_(input[:rows])

    def wait(self, ticket: None) -> None:
        """Return at once."""


@dataclass
class _Flight:
    """A collective under way: its ticket, and what makes of it what is wanted, once it has arrived."""

    ticket: Any
    arrived: Callable[[], Tensor]


class Wire:
    """The collectives of one call of a stack. Sequences are dimension 1 and are cut into `size` parts.

    wire_dtype: what floating-point tensors travel in; None is their own. label: the stack's name in errors and
    statistics. layer_of: each block's layer, for the statistics; None where a layer is two blocks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        schedule: Schedule,
        size: int,
        wire_dtype: torch.dtype | None,
        label: str,
        layer_of: Sequence[int] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._schedule = schedule
        self._size = size
        self._dtype = wire_dtype
        self.label = label
        self._layer_of = layer_of
        self._flights: dict[Op, _Flight] = {}

    def start(self, op: Op, tensor: Tensor) -> None:
        """Start the collective `op` on what its compute op made. An all-reduce overwrites `tensor` if it can."""
        layer = "" if self._layer_of is None else f"layer {self._layer_of[op.block]}, "
        describe = f"{op.carried} ({self.label}, {layer}line {self._schedule.lines[op]} of {self._schedule.name})"
        self._flights[op.carried] = getattr(self, f"_{op.kind}")(tensor, describe)

    def wait(self, op: Op) -> Tensor:
        """Wait for the collective that carries `op.of`; return its result in the type that was given."""
        return self._landed(self._flights.pop(op.carried))

    def forget(self) -> None:
        """Let go of what is under way; the scheduler holds what backends still write to."""
        self._flights.clear()

    def gather(self, part: Tensor, what: str) -> Tensor:
        """Join the ranks' parts of a sequence now."""
        return self._landed(self._all_gather(part, f"{what} of {self.label}"))

    def _landed(self, flight: _Flight) -> Tensor:
        self._scheduler.wait(flight.ticket)
        return flight.arrived()

    def _all_reduce(self, tensor: Tensor, label: str) -> _Flight:
        whole = tensor.contiguous()
        sent = whole.to(self._dtype or tensor.dtype)
        ticket = self._scheduler.all_reduce(sent, label)
        return _Flight(ticket, lambda: whole if sent is whole else whole.copy_(sent))

    def _reduce_scatter(self, tensor: Tensor, label: str) -> _Flight:
        parts = tensor.unflatten(1, (self._size, -1)).movedim(1, 0)
        sent = parts.to(self._dtype or tensor.dtype).contiguous()
        mine = torch.empty_like(sent[0])
        ticket = self._scheduler.reduce_scatter(mine, sent, label)
        return _Flight(ticket, lambda: mine.to(tensor.dtype))

    def _all_gather(self, part: Tensor, label: str) -> _Flight:
        sent = part.to(self._dtype or part.dtype).contiguous()
        parts = sent.new_empty((self._size, *sent.shape))
        ticket = self._scheduler.all_gather(parts, sent, label)
        return _Flight(ticket, lambda: parts.movedim(0, 1).flatten(1, 2).to(part.dtype))
