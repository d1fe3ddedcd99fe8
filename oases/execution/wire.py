"""Collectives of a schedule's ops: the layout and the type in which tensors travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


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


class NullScheduler:
    """Scheduler without communication, for a group of one and for benchmarks of the compute alone.

    allocate_buffers: allocate the buffers of all collectives, also those of replicated gradients, to measure a step's
    memory. (With gloo, its threads hold tensors besides, sometimes longer than the step.)
    """

    def __init__(self, *, allocate_buffers: bool = False) -> None:
        self.allocate_buffers = allocate_buffers

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


class PendingCollective(NamedTuple):
    """A collective under way: its ticket, and the function that makes of it what is wanted, once it has ended."""

    ticket: Any
    result: Callable[[], Tensor]


class Wire:
    """The collectives of one call of a stack. Sequences are dimension 1 and are cut into `size` parts.

    wire_dtype: type that floating-point tensors travel in; None is their own.
    """

    def __init__(self, scheduler: Scheduler, size: int, wire_dtype: torch.dtype | None) -> None:
        self.scheduler = scheduler
        self._size = size
        self._dtype = wire_dtype

    def wait(self, flight: PendingCollective) -> Tensor:
        """Wait for a collective; its result in the type that was given."""
        self.scheduler.wait(flight.ticket)
        return flight.result()

    def all_reduce(self, tensor: Tensor, label: str) -> PendingCollective:
        """Start summing a tensor over the ranks, which is overwritten if it can be."""
        whole = tensor.contiguous()
        if self._dtype is None or self._dtype == whole.dtype:
            return PendingCollective(self.scheduler.all_reduce(whole, label), lambda: whole)
        sent = whole.to(self._dtype)
        return PendingCollective(self.scheduler.all_reduce(sent, label), lambda: whole.copy_(sent))

    def reduce_scatter(self, tensor: Tensor, label: str) -> PendingCollective:
        """Start summing a tensor over the ranks, of which each gets its part of the sequence."""
        parts = tensor.unflatten(1, (self._size, -1)).movedim(1, 0)
        sent = parts.to(self._dtype or tensor.dtype).contiguous()
        mine = torch.empty_like(sent[0])
        ticket = self.scheduler.reduce_scatter(mine, sent, label)
        return PendingCollective(ticket, lambda: mine.to(tensor.dtype))

    def all_gather(self, part: Tensor, label: str) -> PendingCollective:
        """Start joining the ranks' parts of a sequence."""
        sent = part.to(self._dtype or part.dtype).contiguous()
        parts = sent.new_empty((self._size, *sent.shape))
        ticket = self.scheduler.all_gather(parts, sent, label)
        return PendingCollective(ticket, lambda: parts.movedim(0, 1).flatten(1, 2).to(part.dtype))
