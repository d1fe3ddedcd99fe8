"""Gradients of FSDP units, reduced in every backward pass: each rank accumulates a shard of them in float32.

They use the group's OverlapScheduler, as in `gradient_averaging` and for the same reasons; besides, on the CPU FSDP2
waits for each reduce-scatter at once. A unit is sent once its gradients are complete, in one order on all ranks.

Quantised gradients are rounded once, before they are sent, and summed in float32. There is no error feedback: what
rounding loses is as large as the whole gradients, of which no rank keeps any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from oases.core.execution.group import ProcessGroup, group_name, scheduler_of
from oases.distributed.collectives import agreed_group
from oases.distributed.fsdp import FsdpUnit
from oases.distributed.gradient_averaging import GradientAverager, marks
from oases.distributed.parameter_hooks import add_gradient
from oases.plans.shape import REDUCED_UNITS

if TYPE_CHECKING:  # see oases.distributed.fsdp
    pass


class _Bucket:
    """Gradients of a unit: full ones of a pass, those on the way, and the sum of this rank's shards."""

    def __init__(self, unit: FsdpUnit, wire: str) -> None:
        self.unit, self._wire = unit, wire
        self.trained = {name: p for name, p in unit.parameters.items() if p.requires_grad}
        self.missing = set(self.trained)
        self.sent: tuple[Any, Tensor] | None = None
        self.sum: Tensor | None = None
        self._sizes: list[int] = []
        self._used: set[str] = set()  # here, in the passes that were sent

    def send(self) -> None:
        """Start the reduce-scatter of the full gradients. Zeros for a parameter that was not used here."""
        self.receive()
        self.missing = set(self.trained)
        ranks = self.unit.group.size()
        self._sizes = [-(-p.shape[0] // ranks) * (p.numel() // max(1, p.shape[0])) for p in self.trained.values()]
        some = next(iter(self.trained.values()))
        # In float32 at least: a sum of many gradients in 16 bits would lose the small ones.
        wide, length = torch.promote_types(some.dtype, torch.float32), sum(self._sizes)
        used = [each.grad is not None for each in self.trained.values()]
        self._used.update(name for name, here in zip(self.trained, used, strict=True) if here)
        behind = marks(some.new_empty(0, dtype=wide), length, used, self._wire)
        flat = some.new_empty(ranks, length + len(behind), dtype=wide)
        flat[:, length:] = behind
        for parameter, rows in zip(self.trained.values(), flat[:, :length].split(self._sizes, dim=1), strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None or parameter.shape[0] % ranks:
                rows.zero_()
            if gradient is not None:
                for row, part in zip(rows, gradient.chunk(ranks), strict=False):
                    row[: part.numel()].view_as(part).copy_(part)
        if ranks == 1:  # experts that no other rank has: nothing is sent, nor rounded
            self.sent = (None, flat[0])
            return
        mine = torch.empty_like(flat[0])
        label = f"{self.unit.label}, sharded gradients"
        ticket = scheduler_of(self.unit.group).reduce_scatter(mine, flat, label, self._wire)
        self.sent = (ticket, mine)

    def receive(self) -> None:
        """Wait for the sums of a pass and add them to those of earlier passes."""
        if self.sent is None:
            return
        ticket, mine = self.sent
        self.sent = None
        if ticket is not None:
            scheduler_of(self.unit.group).wait(ticket)
        self.sum = mine if self.sum is None else self.sum.add_(mine)

    def deliver(self) -> None:
        """Set the gradient of each shard to its average. Nothing where no pass was sent."""
        from torch.distributed.tensor import DTensor

        total, self.sum = self.sum, None
        if total is None:
            return
        shards, elsewhere = self.unit.shards, [0.0] * len(self.trained)
        if len(self._used) < len(self.trained):  # else the host need not wait for the marks
            elsewhere = total[-len(self.trained) :].tolist()
        parts = total[: sum(self._sizes)].div_(self.unit.group.size()).split(self._sizes)
        for name, part, ranks in zip(self.trained, parts, elsewhere, strict=True):
            if name not in self._used and ranks < 0.5:
                continue  # it stays None, as in one process, and optimizers leave the parameter as it is
            shard = cast(DTensor, shards[name])
            held = shard.to_local()
            mine = part[: held.numel()].view_as(held).to(held.dtype)
            gradient = DTensor.from_local(
                mine, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
            )
            add_gradient(shards[name], gradient)
        self._used.clear()

    def forget(self) -> None:
        """Drop the gradients of a step that failed."""
        self.missing, self.sent, self.sum = set(self.trained), None, None
        self._used.clear()
        for parameter in self.trained.values():
            parameter.grad = None


class ShardedGradientAverager:
    """`GradientAverager` for FSDP units: each rank gets a shard of the averages, accumulated in float32.

    units: in the order of the forward pass. The gradients of a unit are reduced in every backward pass, once they are
    complete; full ones exist of few units at a time. wire: "int8" to send gradients quantised; "" for float32.
    scalars: parameters that every rank has whole, and ranks that average their gradients.
    """

    def __init__(
        self, units: Iterable[FsdpUnit], wire: str = "",
        scalars: tuple[Sequence[nn.Parameter], ProcessGroup | None] = ((), None),
    ) -> None:  # fmt: skip
        self._units, self._wire = list(units), wire
        self.scalars = list(scalars[0])
        self._average = GradientAverager([scalars] if self.scalars else [])
        self._buckets: list[_Bucket] = []
        self._next: dict[str, int] = {}
        self._lanes: dict[str, list[_Bucket]] = {}
        self._part: int | None = None
        self._flying: deque[_Bucket] = deque()
        self._ended = True

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Context of the last backward pass of an optimizer step; afterwards shards have averaged gradients."""
        self.begin_pass(None)
        yield
        if not self._ended:
            self.end_pass()
        self.deliver()

    def deliver(self) -> None:
        """Free the full weights; give each shard the average of its gradients in the passes since the last time."""
        for bucket in self._buckets:
            bucket.unit.free()
            bucket.receive()
            bucket.deliver()
        self._flying.clear()
        self._average.begin()
        self._average.finish()

    def begin_pass(self, part: int | None) -> None:
        """Begin a backward pass of a part of the model, or of all."""
        self.prepare()
        self._part, self._ended = part, False
        self._next = dict.fromkeys(self._lanes, 0)
        for bucket in self._buckets:
            bucket.missing = set(bucket.trained)

    def end_pass(self) -> None:
        """Start the collectives of units whose gradients are not complete. Equal on every rank."""
        for name in self._lanes:
            self._send(name, flush=True)
        self._ended = True

    def forget(self) -> None:
        """Drop the gradients of a step that failed, and free the full weights."""
        self._flying.clear()
        for bucket in self._buckets:
            bucket.forget()
        self.free()

    def free(self) -> None:
        """Free all full weights."""
        for unit in self._units:
            unit.free()

    def prepare(self) -> None:
        """Create the buckets before the first backward pass, when the model is on its device.

        Collective: UsageError, on all ranks, where their wires differ.
        """
        if self._buckets:
            return
        found = [_Bucket(unit, self._wire) for unit in reversed(self._units)]
        self._buckets = [bucket for bucket in found if bucket.trained]
        for bucket in self._buckets:
            lane = group_name(bucket.unit.group)
            if lane not in self._lanes and bucket.unit.group.size() > 1:
                caller = "the average of sharded gradients"
                agreed_group(lane, caller, self._wire or None, "gradient_wire")
            self._lanes.setdefault(lane, []).append(bucket)
            bucket.unit.computed = self._computed(bucket, lane)
            for name, parameter in bucket.trained.items():
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, name, lane))

    def _hook(self, bucket: _Bucket, name: str, lane: str) -> Any:
        def note(_: Tensor) -> None:
            bucket.missing.discard(name)
            self._send(lane)

        return note

    def _computed(self, bucket: _Bucket, lane: str) -> Callable[[], None]:
        def note() -> None:
            bucket.missing.clear()
            self._send(lane)

        return note

    def _send(self, name: str, *, flush: bool = False) -> None:
        """Start complete buckets in their order, the same on every rank."""
        lane = self._lanes[name]
        while self._next[name] < len(lane):
            bucket = lane[self._next[name]]
            if None in (self._part, bucket.unit.part) or bucket.unit.part == self._part:
                if bucket.missing and not flush:
                    return
                bucket.send()
                self._flying.append(bucket)
                if len(self._flying) > REDUCED_UNITS:
                    self._flying.popleft().receive()
            self._next[name] += 1
