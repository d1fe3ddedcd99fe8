"""Trans and Agg: send an expert's parameters to the devices with replicas, and reduce their gradients to the owner.

Both take two rounds, one all-to-all each for all replicated experts. Trans: the owner scatters equal shares of the
parameters over the replicas, then replicas all-gather the shares; the owner sends an expert once, for any number of
replicas. Agg: replicas reduce-scatter their gradients, then send the sums to the owner. Sums are taken in the order
of the replicas. Only parameters of the current step are sent: the optimizer sees the owner's alone. Source:
Pro-Prophet (arXiv 2411.10003), Trans and Agg; the timing is "rounds" in `oases.moe.costs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.moe.dispatch import AllToAll
from oases.moe.experts import ExpertWeights
from oases.moe.gradients import with_gradients
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
        size, self._rank, local = group_size(group), group_rank(group), self._local
        self._shapes = [weight.shape[1:] for weight in weights.given]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.held = [expert for expert in placement.moved if self._rank in placement.copies[expert]]
        """Experts with a replica on this rank, in ascending order."""
        self._moved = [expert for expert in placement.moved if expert // local == self._rank]
        self._first = self._rank * local
        # Elements sent and received, of owned experts' parameters (out, in) and among replicas (given, taken).
        pieces: list[Pieces] = [[[] for _ in range(size)] for _ in range(4)]
        self._out, self._in, self._given, self._taken = pieces
        for expert in placement.moved:
            holders, whole = placement.copies[expert], sum(self._sizes)
            bounds = [whole * j // len(holders) for j in range(len(holders) + 1)]
            shares = dict(zip(holders, itertools.pairwise(bounds), strict=True))
            if expert // local == self._rank:
                row = self._moved.index(expert)
                for holder, share in shares.items():
                    self._out[holder].append(_Piece(row, *share))
            if self._rank in shares:
                row, mine = self.held.index(expert), shares.pop(self._rank)
                self._in[expert // local].append(_Piece(row, *mine))
                for holder, share in shares.items():
                    self._given[holder].append(_Piece(row, *mine))
                    self._taken[holder].append(_Piece(row, *share))
        self._owners = AllToAll(group, _lengths(self._out), _lengths(self._in), "")
        self._holders = AllToAll(group, _lengths(self._given), _lengths(self._taken), "")
        self._copies: Tensor | None = None
        self._own: list[Tensor] | None = None  # this rank's own part of the sums

    @property
    def bytes(self) -> int:
        """Bytes that this rank sends in Trans."""
        return sum(_lengths(self._out) + _lengths(self._given)) * self._form.up.element_size()

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
        self._start(self._owners, _cut_out(rows, self._out), "parameters to their holders")

    def exchange(self) -> None:
        """Wait for the shares of the replicas here; start to send them to the other replicas."""
        assert self._copies is not None, "scatter comes first"
        for _, (row, first, last), numbers in self._received(self._owners, self._in):
            self._copies[row, first:last] = numbers
        sent = [self._copies[row, first:last] for pieces in self._given for row, first, last in pieces]
        self._start(self._holders, sent, "parameters among their holders")

    def finish(self) -> list[Tensor]:
        """Wait for the others' shares. Returns [replicas, ...] of each weight, views of one buffer."""
        assert self._copies is not None, "scatter comes first"
        copies, self._copies = self._copies, None
        for _, (row, first, last), numbers in self._received(self._holders, self._taken):
            copies[row, first:last] = numbers
        parts = copies.split(self._sizes, dim=1)
        return [part.view(len(copies), *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Start to send the other replicas their shares of gradients, in the form that `finish` returned."""
        rows = [[gradient[row].reshape(-1) for gradient in gradients] for row in range(len(self.held))]
        self._own = _cut_out(rows, self._in)
        self._start(self._holders, _cut_out(rows, self._taken), "gradients among their holders", back=True)

    def gather(self) -> None:
        """Wait for the others' parts of this rank's shares; start to send the sums to the owners."""
        assert self._own is not None, "reduce comes first"
        own, self._own = self._own, None
        order = [piece.row for pieces in self._in for piece in pieces]
        parts = {row: [(self._rank, numbers)] for row, numbers in zip(order, own, strict=True)}
        for holder, piece, numbers in self._received(self._holders, self._given):
            parts[piece.row].append((holder, numbers))
        sums = [_sum([numbers for _, numbers in sorted(parts[row], key=lambda part: part[0])]) for row in order]
        sums = [each.to(self._form.up.dtype) for each in sums]
        self._start(self._owners, sums, "gradients to their owners", back=True)

    @torch.no_grad()
    def collect(self, gradients: Sequence[Tensor]) -> None:
        """Wait for the sums, and add them to the gradients of the owned weights."""
        rows = [[gradient[expert - self._first].view(-1) for gradient in gradients] for expert in self._moved]
        for _, piece, numbers in self._received(self._owners, self._out):
            parts = _parts(rows[piece.row], piece.first, piece.last)
            for part, share in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
                part += share

    def _start(self, through: AllToAll, sent: list[Tensor], what: str, *, back: bool = False) -> None:
        going = torch.cat(sent) if sent else self._form.up.new_empty(0)
        through.start(going[:, None], back=back, label=f"{what}, {self._label}")

    def _received(self, through: AllToAll, into: Pieces) -> list[tuple[int, _Piece, Tensor]]:
        """Wait: the rank that sent each piece, the piece and its elements."""
        found = [(rank, piece) for rank, pieces in enumerate(into) for piece in pieces]
        numbers = through.finish().flatten().split([piece.last - piece.first for _, piece in found])
        return [(*each, part) for each, part in zip(found, numbers, strict=True)]


def tie(rows: Tensor, number: Tensor) -> Tensor:
    """`rows`, whose backward pass reaches `number`, with a gradient of 0."""
    return with_gradients(lambda *grads: grads, rows, number)[0]


def _parts(flat: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Elements [first, last) of consecutive tensors, as views."""
    found, start = [], 0
    for tensor in flat:
        part = tensor[max(0, first - start) : max(0, last - start)]
        if len(part):
            found.append(part)
        start += len(tensor)
    return found


def _cut_out(rows: Sequence[Sequence[Tensor]], by_rank: Pieces) -> list[Tensor]:
    cut = (_parts(rows[row], first, last) for pieces in by_rank for row, first, last in pieces)
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in cut]


def _lengths(by_rank: Pieces) -> list[int]:
    return [sum(piece.last - piece.first for piece in pieces) for pieces in by_rank]


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
