"""Trans and Agg: send an expert's parameters to the devices with replicas, and reduce their gradients to the owner.

Both take two rounds, one all-to-all each for all replicated experts. Trans: the owner scatters equal shares of the
parameters over the replicas, then replicas all-gather the shares; the owner sends an expert once, for any number of
replicas. Agg: replicas reduce-scatter their gradients, then send the sums to the owner. Sums are taken in the order
of the replicas. Only parameters of the current step are sent: the optimizer sees the owner's alone. Source:
Pro-Prophet (arXiv 2411.10003), Trans and Agg; the timing is "rounds" in `oases.moe.costs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oases.core.execution.group import ProcessGroup, group_rank, group_size, scheduler_of
from oases.moe.experts import ExpertWeights
from oases.moe.placement import Placement


class _Piece(NamedTuple):
    """Elements [first, last) of an expert's flattened parameters; row: index of the expert."""

    row: int
    first: int
    last: int


Pieces = list[list[_Piece]]
"""Pieces by rank."""


class Transfer:
    """Replica transfers of one forward pass, under a placement with replicas. Collective: all ranks create one.

    `send` and `receive` are Trans with a gradient, which is Agg. A schedule uses their parts: scatter, exchange,
    finish for the parameters, and reduce, gather, collect for the gradients, in this order.
    """

    def __init__(self, weights: ExpertWeights, placement: Placement, group: ProcessGroup, label: str) -> None:
        self._label, self._local = label, len(weights.up)
        self._form = weights.like([weight.detach().new_empty(0) for weight in weights.given])
        self._scheduler = scheduler_of(group)
        size, rank, local = group_size(group), group_rank(group), self._local
        self._shapes = [weight.shape[1:] for weight in weights.given]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.held = [expert for expert in placement.moved if rank in placement.copies[expert]]
        """Experts with a replica on this rank, in ascending order."""
        self._moved = [expert for expert in placement.moved if expert // local == rank]
        self._first = rank * local
        # Elements sent and received, of owned experts' parameters (out, in) and among replicas (given, taken).
        self._out: Pieces = [[] for _ in range(size)]
        self._in: Pieces = [[] for _ in range(size)]
        self._given: Pieces = [[] for _ in range(size)]
        self._taken: Pieces = [[] for _ in range(size)]
        for expert in placement.moved:
            holders = placement.copies[expert]
            whole = sum(self._sizes)
            bounds = [(whole * j // len(holders), whole * (j + 1) // len(holders)) for j in range(len(holders))]
            if expert // local == rank:
                row = self._moved.index(expert)
                for holder, share in zip(holders, bounds, strict=True):
                    self._out[holder].append(_Piece(row, *share))
            if rank in holders:
                row, mine = self.held.index(expert), bounds[holders.index(rank)]
                self._in[expert // local].append(_Piece(row, *mine))
                for holder, share in zip(holders, bounds, strict=True):
                    if holder != rank:
                        self._given[holder].append(_Piece(row, *mine))
                        self._taken[holder].append(_Piece(row, *share))
        self._copies: Tensor | None = None
        self._own: list[Tensor] | None = None  # this rank's own part of the sums
        self._under_way: tuple[Any, Tensor, Pieces] | None = None

    @property
    def bytes(self) -> int:
        """Bytes that this rank sends in Trans."""
        numbers = sum(piece.last - piece.first for pieces in (self._out, self._given) for piece in _flat(pieces))
        return numbers * self._form.up.element_size()

    def zeros(self) -> list[Tensor]:
        """Zeros of the owned weights' sizes, for `collect`."""
        return [self._form.up.new_zeros((self._local, *shape)) for shape in self._shapes]

    def send(self, weights: ExpertWeights) -> Tensor:
        """Start to send the owned weights; returns the argument of `receive`."""
        return _Send.apply(self, *weights.given)

    def receive(self, pending: Tensor) -> tuple[ExpertWeights, Tensor]:
        """Wait; return the parameters of `held`, stacked, and a number to `tie` to later results.

        Ranks without replicas take part in Agg, too: they may own some of the experts.
        """
        number, *copies = _Receive.apply(pending, self)
        return self._form.like(copies), number

    @torch.no_grad()
    def scatter(self, given: Sequence[Tensor]) -> None:
        """Start to send the shares of the owned experts, whose weights are given."""
        rows = [[weight[expert - self._first].reshape(-1) for weight in given] for expert in self._moved]
        self._copies = self._form.up.new_empty((len(self.held), sum(self._sizes)))
        self._start(_cut_out(rows, self._out), self._out, self._in, "parameters to their holders")

    def exchange(self) -> None:
        """Wait for the shares of the replicas here; start to send them to the other replicas."""
        assert self._copies is not None, "scatter comes first"
        self._put(self._copies)
        sent = [self._copies[row, first:last] for row, first, last in _flat(self._given)]
        self._start(sent, self._given, self._taken, "parameters among their holders")

    def finish(self) -> list[Tensor]:
        """Wait for the others' shares. Returns [replicas, ...] of each weight, views of one buffer."""
        assert self._copies is not None, "scatter comes first"
        copies, self._copies = self._copies, None
        self._put(copies)
        parts = copies.split(self._sizes, dim=1)
        return [part.view(len(copies), *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Start to send the other replicas their shares of gradients, in the form that `finish` returned."""
        rows = [[gradient[row].reshape(-1) for gradient in gradients] for row in range(len(self.held))]
        self._own = _cut_out(rows, self._in)
        self._start(_cut_out(rows, self._taken), self._taken, self._given, "gradients among their holders")

    def gather(self) -> None:
        """Wait for the others' parts of this rank's shares; start to send the sums to the owners."""
        assert self._own is not None, "reduce comes first"
        own, self._own = self._own, None
        rank = self._scheduler.rank
        received = self._received()
        parts = {piece.row: [(rank, numbers)] for piece, numbers in zip(_flat(self._in), own, strict=True)}
        for holder, pieces in enumerate(received):
            for piece, numbers in pieces:
                parts[piece.row].append((holder, numbers))
        sums = [
            _sum([numbers for _, numbers in sorted(parts[piece.row], key=lambda part: part[0])]).to(
                self._form.up.dtype
            )
            for piece in _flat(self._in)
        ]
        self._start(sums, self._in, self._out, "gradients to their owners")

    @torch.no_grad()
    def collect(self, gradients: Sequence[Tensor]) -> None:
        """Wait for the sums, and add them to the gradients of the owned weights."""
        rows = [[gradient[expert - self._first].view(-1) for gradient in gradients] for expert in self._moved]
        for pieces in self._received():
            for piece, numbers in pieces:
                parts = _parts(rows[piece.row], piece.first, piece.last)
                for part, share in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
                    part += share

    def _start(self, sent: list[Tensor], out: Pieces, into: Pieces, what: str) -> None:
        """Send the elements of the pieces of `out`, in order; receive those of `into`."""
        like = self._form.up
        going = torch.cat(sent) if sent else like.new_empty(0)
        coming = like.new_empty(sum(_lengths(into)))
        label = f"{what}, {self._label}"
        ticket = self._scheduler.all_to_all(coming, going, _lengths(out), _lengths(into), label)
        self._under_way = (ticket, coming, into)

    def _received(self) -> list[list[tuple[_Piece, Tensor]]]:
        assert self._under_way is not None
        (ticket, coming, into), self._under_way = self._under_way, None
        self._scheduler.wait(ticket)
        numbers = iter(coming.split([piece.last - piece.first for piece in _flat(into)]) if _flat(into) else ())
        return [[(piece, next(numbers)) for piece in pieces] for pieces in into]

    def _put(self, rows: Tensor) -> None:
        for pieces in self._received():
            for (row, first, last), numbers in pieces:
                rows[row, first:last] = numbers


def tie(rows: Tensor, number: Tensor) -> Tensor:
    """`rows`, whose backward pass reaches `number`, with a gradient of 0."""
    return _Tied.apply(rows, number)


def _flat(pieces: Iterable[list[_Piece]]) -> list[_Piece]:
    return [piece for of_rank in pieces for piece in of_rank]


def _parts(flat: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Elements [first, last) of consecutive tensors, as views."""
    found, start = [], 0
    for tensor in flat:
        part = tensor[max(0, first - start) : max(0, last - start)]
        if len(part):
            found.append(part)
        start += len(tensor)
    return found


def _cut_out(rows: Sequence[Sequence[Tensor]], pieces: Pieces) -> list[Tensor]:
    cut = (_parts(rows[row], first, last) for row, first, last in _flat(pieces))
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in cut]


def _lengths(pieces: Pieces) -> list[int]:
    return [sum(piece.last - piece.first for piece in of_rank) for of_rank in pieces]


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *weights: Tensor) -> Tensor:
        ctx.transfer = transfer
        transfer.scatter(weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        ctx.transfer.gather()
        found = ctx.transfer.zeros()
        ctx.transfer.collect(found)
        wanted = ctx.needs_input_grad[1:]
        return None, *(gradient if wants else None for gradient, wants in zip(found, wanted, strict=True))


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, transfer: Transfer) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        transfer.exchange()
        return pending.clone(), *transfer.finish()

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.transfer.reduce(gradients)
        return gradients[0].new_zeros(()), None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, number: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad.new_zeros(())
