"""Token dispatch and combine of expert parallelism: counts, permutation, all-to-all, weighted sum.

A slot is a (token, expert) pair. Slots are sent grouped by (device that computes them, expert), so the counts, which
all ranks gather, determine all row sizes: no further metadata is exchanged. Each all-to-all is two autograd nodes,
`send` and `receive`. Compute between them overlaps with it, also in the backward pass: there `receive` starts the
reverse all-to-all and `send` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oases.core.blocks.sharding import Cut
from oases.core.dtypes import WIRE_BYTES
from oases.core.execution.communication import WireType, add_wire
from oases.core.execution.group import ProcessGroup, group_rank, group_size, scheduler_of
from oases.kernels import permute as kernels
from oases.moe.placement import Integers, Placement, owner_ranks
from oases.moe.router import Routing


class RoutingError(RuntimeError):
    """Invalid routing. Every rank of the layer's group raises it."""


@dataclass(frozen=True)
class ExpertCounts:
    """Gathered counts of a routing, equal on all ranks.

    counts[expert, device]: slots that are sent. slots[device]: slots before any was dropped.
    """

    counts: Integers
    slots: Integers

    @property
    def dropped(self) -> int:
        """Slots of all ranks that are not sent."""
        return int(self.slots.sum() - self.counts.sum())


def start_counts(
    routings: list[Routing], group: ProcessGroup | None, *, state: int = 0, label: str = "MoE layer"
) -> Callable[[], list[ExpertCounts]]:
    """Start to gather the counts of all ranks of `group`, by an all-gather of E numbers.

    Call the result for those of each routing, once; the device computes what is queued meanwhile. routings: one, or
    several where the right one is found by comparison. state: 62-bit number that must be equal on every rank, a
    digest of state that ranks compute independently. label: the layer's name. The call raises RoutingError, on every
    rank, where gates of any rank are not finite, name no expert, or states differ.
    """
    size = group_size(group)
    counts = torch.stack([routing.counts for routing in routings])
    faulty = torch.stack([routing.faulty for routing in routings]).any()
    counts = torch.where(faulty, -1, counts).flatten()
    slots = routings[0].experts.numel()
    mine = torch.cat([counts, to_device(np.array([slots, state]), counts.device)])
    everyone = mine.new_empty((size, len(mine)))
    if size > 1:
        assert group is not None
        scheduler = scheduler_of(group)
        scheduler.wait(scheduler.all_gather(everyone, mine, f"counts of {label}"))
    else:
        everyone[0] = mine
    arrived = to_host_async(everyone)
    return lambda: _checked(arrived().numpy(), len(routings), label)


def _checked(found: Integers, routings: int, label: str) -> list[ExpertCounts]:
    """Counts from what the ranks sent, [rank, numbers of `start_counts`]."""
    size = len(found)
    wrong = np.flatnonzero((found[:, :-2] < 0).any(1)).tolist()
    if wrong:
        raise RoutingError(
            f"{label}: the router's gates are not finite on rank {', '.join(map(str, wrong))} of {size}, or its "
            "choice is none of the layer's experts. Check the layer's input, the router's weight and its bias there "
            "with torch.isfinite, or under torch.autograd.set_detect_anomaly; often the learning rate is too high or "
            "float16 overflows"
        )
    differing = np.flatnonzero(found[:, -1] != found[0, -1]).tolist()
    if differing:
        raise RoutingError(
            f"{label}: rank {differing[0]} has another layer, forward pass, mode or placement than rank 0; all ranks "
            "must call the same layers equally often, in the same order and mode, with the same costs and placement. "
            "Batches of different sizes may be split into different numbers of sub-batches: give sub_batches=1 then"
        )
    counts = np.ascontiguousarray(found[:, :-2].reshape(size, routings, -1).transpose(1, 2, 0))
    return [ExpertCounts(each, found[:, -2].copy()) for each in counts]


def shard_bounds(tokens: int, group: ProcessGroup | None) -> tuple[int, int]:
    """[first, last) of this rank's share of the tokens that a group holds; shares differ by one at most."""
    return Cut(0, (tokens,), level=True).ranges(group_rank(group), group_size(group))[0]


def to_device(array: Integers, device: torch.device) -> Tensor:
    """A copy on a device, which nothing waits for."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def to_host_async(x: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host; call the result to wait for it, and for nothing that is queued later."""
    if x.device.type == "cpu":
        return lambda: x
    host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.Event(device=x.device.type)
    copied.record(torch.accelerator.current_stream(x.device))

    def arrived() -> Tensor:
        copied.synchronize()
        return host

    return arrived


@dataclass(frozen=True)
class DispatchPlan:
    """Row sizes and orders of one rank.

    positions: int64 [E], position of each expert in this rank's send order. sent, received: rows to and from each
    rank. held: experts computed here, owned ones, then replicas, each in ascending order. own: number of owned ones.
    rows: rows of each held expert. order, inverse: int64 [rows], permutation of received rows to the order of held
    experts, and its inverse.
    """

    positions: Tensor
    sent: list[int]
    received: list[int]
    held: list[int]
    own: int
    rows: list[int]
    order: Tensor
    inverse: Tensor


def dispatch_plan(counts: Integers, placement: Placement, rank: int, device: torch.device) -> DispatchPlan:
    """Plan of `rank` for these counts [expert, device] under a placement; device: of its tensors."""
    experts, devices = counts.shape
    to = placement.routes[:, rank]  # which device computes this rank's slots, by expert
    outgoing = np.argsort(to, kind="stable")
    positions = np.empty(experts, dtype=np.int64)
    positions[outgoing] = np.arange(experts)
    sent = np.bincount(to, weights=counts[:, rank], minlength=devices).astype(np.int64)

    at_home = np.flatnonzero(owner_ranks(experts, devices) == rank)
    held = [*at_home.tolist(), *(expert for expert in placement.moved if rank in placement.copies[expert])]
    # Blocks of rows [held expert, source]: they arrive by source, then by expert, and are reordered by held expert.
    blocks = np.where(placement.routes[held] == rank, counts[held], 0)
    numbers = np.argsort(held, kind="stable")  # of a source's blocks, as they come
    arriving = blocks[numbers].T.ravel()
    first = np.empty((devices, len(held)), dtype=np.int64)
    first[:, numbers] = (np.cumsum(arriving) - arriving).reshape(devices, len(held))
    lengths = blocks.ravel()
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order = np.repeat(first.T.ravel(), lengths) + within
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))

    return DispatchPlan(
        to_device(positions, device), sent.tolist(), blocks.sum(0).tolist(), held, len(at_home),
        blocks.sum(1).tolist(), to_device(order, device), to_device(inverse, device),
    )  # fmt: skip


def permuted(x: Tensor, routing: Routing, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
    """x: [T, n] -> (rows [sent slots, n] in send order, source for `by_token`)."""
    experts = len(plan.positions)
    ids = plan.positions[routing.experts]
    if routing.kept is not None:  # dropped slots come last
        ids = torch.where(routing.kept, ids, experts)
    rows, source, _ = by_expert(x, ids, experts + 1)
    return rows[: sum(plan.sent)], source


def by_expert(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.permute` of ids that were checked, with a fallback for float64."""
    if x.dtype is not torch.float64:
        return kernels.permute(x, ids, experts, check=False)
    source = ids.flatten().argsort(stable=True)
    return x[source // max(ids.shape[1], 1)], source, kernels.histogram(ids, experts, check=False)


def by_token(rows: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    """Inverse of `by_expert` and of `permuted`: weighted sum of each token's rows, weights [T, k].

    Missing last rows, of dropped slots, count as 0.
    """
    tokens, k = weights.shape
    if len(rows) < len(source):
        rows = torch.cat([rows, rows.new_zeros((len(source) - len(rows), rows.shape[1]))])
    if rows.dtype is torch.float64:
        slots = rows[source.argsort()].view(tokens, k, rows.shape[1])
        return (slots * weights.to(rows.dtype)[..., None]).sum(1)
    return kernels.unpermute(rows, source, weights.float(), tokens)


def reordered(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows by index, a permutation with this inverse: from source to held-expert order with those of a plan."""
    return _Reordered.apply(rows, order, inverse)


class AllToAll:
    """All-to-all of rows over a group, and its reverse for their gradients.

    sent, received: rows to and from each rank. wire: type in which rows and gradients are sent, as `wire_type` gives
    it, equal on all ranks; None for their own. Without a group rows are returned as they are.
    """

    def __init__(
        self, group: ProcessGroup | None, sent: list[int], received: list[int], label: str,
        wire: WireType | None = None,
    ) -> None:  # fmt: skip
        self._scheduler: Any = None
        self._dtype, self._code = (None, {"wire": wire}) if isinstance(wire, str) else (wire, {})
        if group is not None and group_size(group) > 1:
            if isinstance(wire, str):
                add_wire(group)
            self._scheduler = scheduler_of(group)
        self._sent, self._received, self._label = sent, received, label
        self._under_way: tuple[Any, Tensor, torch.dtype] | None = None

    def send(self, rows: Tensor) -> Tensor:
        """Start. rows: [sum of sent, n]. Returns the argument of `receive`, which has the shape of its result."""
        return rows if self._scheduler is None else _Send.apply(rows, self)

    def receive(self, pending: Tensor) -> Tensor:
        """Wait for the all-to-all that `send` started: [sum of received, n]."""
        return pending if self._scheduler is None else _Receive.apply(pending, self)

    def start(self, rows: Tensor, *, back: bool = False, label: str = "") -> Tensor:
        """Start to send rows, or gradients back; `finish` waits. Returns zeros of the reverse direction's shape.

        label: in place of the exchange's own.
        The zeros are an expanded scalar: a placeholder for autograd, without memory.
        """
        if self._scheduler is None:
            self._under_way = None, rows, rows.dtype
            return rows
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        going = rows.detach().to(self._dtype or rows.dtype).contiguous()
        coming = going.new_empty((sum(received), rows.shape[1]))
        label = label or (f"{self._label}, gradients" if back else self._label)
        ticket = self._scheduler.all_to_all(coming, going, sent, received, label, **self._code)
        self._under_way = ticket, coming, rows.dtype
        return rows.new_zeros(()).expand(rows.shape if back else coming.shape)

    def finish(self) -> Tensor:
        """Wait for the last start; the result has the type of what was sent."""
        assert self._under_way is not None, "send comes before receive"
        (ticket, coming, dtype), self._under_way = self._under_way, None
        if self._scheduler is not None:
            self._scheduler.wait(ticket)
        return coming.to(dtype)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.exchange.finish(), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, exchange: AllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.exchange.start(grad, back=True), None


class _Reordered(torch.autograd.Function):
    # The gradient is an index_select, too, because the index is a permutation.
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def wire_bytes(dtype: torch.dtype, wire: WireType | None) -> float:
    """Bytes in which a number of this dtype is sent; quantised, with its part of a block's scale."""
    return WIRE_BYTES[wire] if isinstance(wire, str) else (wire or dtype).itemsize
