"""Collectives of a schedule's ops: layout and type of the tensors that are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Scheduler(Protocol):
    """Collectives that a Wire uses; implemented by `oases._C.OverlapScheduler`."""

    def all_reduce(self, tensor: Tensor, label: str = "") -> Any:
        """Start to sum `tensor` over the ranks in place; return a ticket."""

    def reduce_scatter(self, output: Tensor, input: Tensor, label: str = "") -> Any:
        """Start to sum `input` [ranks, ...] over the ranks, this rank's part into `output`; return a ticket."""

    def all_gather(self, output: Tensor, input: Tensor, label: str = "") -> Any:
        """Start to concatenate every rank's `input` in `output` [ranks, ...]; return a ticket."""

    def all_to_all(self, output: Tensor, input: Tensor, sent: list[int], received: list[int], label: str = "") -> Any:
        """Start to send each rank its rows of `input`; `output` gets theirs, in rank order; return a ticket."""

    def wait(self, ticket: Any) -> None:
        """Wait until the ticket's result may be used."""


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
        """Copy one part in place of the sum."""
        output.copy_(input[0])

    def all_gather(self, output: Tensor, input: Tensor, label: str = "") -> None:
        """Copy `input` in place of every rank's."""
        output.copy_(input.expand_as(output))

    def all_to_all(
        self, output: Tensor, input: Tensor, sent: list[int], received: list[int], label: str = ""
    ) -> None:
        """Copy rows of `input` in place of the other ranks', then zeros."""
        rows = min(len(output), len(input))
        output.zero_()[:rows].copy_(input[:rows])

    def wait(self, ticket: None) -> None:
        """Return at once."""


class PendingCollective(NamedTuple):
    """Started collective: its ticket, and the function that returns its result after the wait."""

    ticket: Any
    result: Callable[[], Tensor]


class Wire:
    """Collectives of one call of a stack. The sequence is dimension 1, in `size` parts.

    wire_dtype: type in which floating-point tensors are sent; None for their own.
    """

    def __init__(self, scheduler: Scheduler, size: int, wire_dtype: torch.dtype | None) -> None:
        self.scheduler = scheduler
        self._size = size
        self._dtype = wire_dtype

    def wait(self, flight: PendingCollective) -> Tensor:
        """Wait for a collective; return its result in the original type."""
        self.scheduler.wait(flight.ticket)
        return flight.result()

    def all_reduce(self, tensor: Tensor, label: str) -> PendingCollective:
        """Start to sum a tensor over the ranks, in place where possible."""
        whole = tensor.contiguous()
        if self._dtype is None or self._dtype == whole.dtype:
            return PendingCollective(self.scheduler.all_reduce(whole, label), lambda: whole)
        sent = whole.to(self._dtype)
        return PendingCollective(self.scheduler.all_reduce(sent, label), lambda: whole.copy_(sent))

    def reduce_scatter(self, tensor: Tensor, label: str) -> PendingCollective:
        """Start to sum a tensor over the ranks; each gets its part of the sequence."""
        parts = tensor.unflatten(1, (self._size, -1)).movedim(1, 0)
        sent = parts.to(self._dtype or tensor.dtype).contiguous()
        mine = torch.empty_like(sent[0])
        ticket = self.scheduler.reduce_scatter(mine, sent, label)
        return PendingCollective(ticket, lambda: mine.to(tensor.dtype))

    def all_gather(self, part: Tensor, label: str) -> PendingCollective:
        """Start to concatenate the ranks' parts of a sequence."""
        sent = part.to(self._dtype or part.dtype).contiguous()
        parts = sent.new_empty((self._size, *sent.shape))
        ticket = self.scheduler.all_gather(parts, sent, label)
        return PendingCollective(ticket, lambda: parts.movedim(0, 1).flatten(1, 2).to(part.dtype))
