"""Data parallelism: gradients averaged over the data-parallel ranks, overlapped with the backward pass.

torch's DistributedDataParallel is not used, for three reasons. It prepares for a backward pass in the preceding
forward pass, so where forward passes run ahead, as in a pipeline, it would reduce the wrong micro-batch. One wrapper
has one group and one module's forward pass: a model whose segments have groups of their own, and whose embedding is
used again in its head, would have to be split for it. And its collectives are not tickets, so `oases.report()` could
not show whether they were hidden, nor an error which of them a rank waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.dtypes import QUANTISED_BLOCK
from oases.core.execution.failure import FailTogether, monitor_of
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_size, scheduler_of
from oases.distributed.collectives import agreed_group, all_reduce
from oases.distributed.dtensors import part_of_rank
from oases.errors import UsageError
from oases.plans.plan import BUCKET_BYTES

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class _Bucket:
    """Parameters whose gradients are reduced together, and the collective under way."""

    def __init__(self, parameters: list[nn.Parameter], label: str) -> None:
        self.parameters = parameters
        self.label = label
        self.missing = {id(parameter) for parameter in parameters}
        self.sent: tuple[Any, Tensor] | None = None
        self.residual: Tensor | None = None
        """Rounding errors of earlier quantised sums on this rank; added to the next one."""
        self._sizes = [part_of_rank(parameter).numel() for parameter in parameters]

    def reset(self) -> None:
        self.missing = {id(parameter) for parameter in self.parameters}
        self.sent = None

    def flat(self, wire: str) -> Tensor:
        """Gradients, and behind them whether each parameter has one: other ranks may have used those that do not."""
        parts = [
            torch.zeros_like(part_of_rank(each.detach()), dtype=each.grad_dtype or each.dtype)
            if each.grad is None
            else part_of_rank(each.grad)
            for each in self.parameters
        ]
        used = [each.grad is not None for each in self.parameters]
        return torch.cat([*(part.flatten() for part in parts), marks(parts[0], sum(self._sizes), used, wire)])

    def put(self, average: Tensor, ranks: int) -> None:
        """Take over averages. A gradient that no rank has stays None, and optimizers leave its parameter as it is."""
        parts = average[: sum(self._sizes)].split(self._sizes)
        if any(each.grad is None for each in self.parameters):  # else the host need not wait for the marks
            used = average[-len(self.parameters) :].tolist()
            for parameter, share in zip(self.parameters, used, strict=True):
                if parameter.grad is None and share > 0.5 / ranks:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        pairs = [(part_of_rank(each.grad), part) for each, part in zip(self.parameters, parts, strict=True)
                 if each.grad is not None]  # fmt: skip
        if pairs:
            torch._foreach_copy_([g for g, _ in pairs], [part.view_as(g) for g, part in pairs])


def marks(like: Tensor, length: int, used: Sequence[bool], wire: str) -> Tensor:
    """Numbers to send behind `length` others: 1 for each parameter that was used here, 0 for others.

    Quantised ones are in blocks of their own, in which they are exact.
    """
    found = like.new_ones(len(used)) if all(used) else like.new_tensor(used)
    return torch.cat([like.new_zeros(-length % QUANTISED_BLOCK), found]) if wire else found


class _Lane:
    """Buckets of one group. They start in their order, whichever is complete first, the same on every rank."""

    def __init__(self, group: ProcessGroup, buckets: list[_Bucket], wire: str) -> None:
        self._group_name = group_name(group)
        self.buckets = buckets
        self._next = 0
        self._wire = wire
        sizes = [sum(part_of_rank(each).numel() for each in bucket.parameters) for bucket in buckets]
        about = ("numbers in each bucket", tuple(sizes))
        agreed_group(self._group_name, "the average of gradients", wire or None, "gradient_wire", about)

    @property
    def group(self) -> ProcessGroup:
        found = group_of(self._group_name)
        assert found is not None
        return found

    @property
    def _scheduler(self) -> Any:
        return scheduler_of(self.group)

    def reset(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def send(self, *, flush: bool = False) -> None:
        """Start the all-reduce of complete buckets, up to the first incomplete one."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and not flush:
                return
            flat = bucket.flat(self._wire)
            bucket.sent = (self._start(bucket, flat), flat)
            self._next += 1

    def _start(self, bucket: _Bucket, flat: Tensor) -> Any:
        if not self._wire:
            return self._scheduler.all_reduce(flat, bucket.label)
        if bucket.residual is None:
            bucket.residual = torch.zeros_like(flat, dtype=torch.float32)
        return self._scheduler.all_reduce(flat, bucket.label, wire=self._wire, residual=bucket.residual)

    def receive(self) -> None:
        """Wait for all sums and replace the gradients by the averages."""
        for bucket in self.buckets:
            assert bucket.sent is not None
            ticket, flat = bucket.sent
            bucket.sent = None
            self._scheduler.wait(ticket)
            bucket.put(flat.div_(self._scheduler.size), self._scheduler.size)


class GradientAverager:
    """Averages gradients over data-parallel groups, overlapped with the last backward pass of a step.

        for tokens in earlier_micro_batches:
            model.loss(tokens).backward()                # gradients accumulate, nothing is sent
        with average.overlapped():
            model.loss(last_micro_batch).backward()      # sent bucket by bucket; averages when the block ends

    parts: (parameters, group) of each part of the model, in the order of its forward pass; parts of one group are
    reduced together, those without a group or with a group of one not at all. Create it once the model is on its
    device: it registers hooks on the parameters. bucket_bytes: bytes per collective. wire: "int8" for
    gradients quantised on the way, with error feedback: what rounding loses is added to the next step's gradients,
    and costs 4 bytes per parameter; "" for their own type. Collective: UsageError, on all ranks, where their wires
    differ.
    """

    def __init__(
        self,
        parts: Iterable[tuple[Iterable[nn.Parameter], ProcessGroup | None]],
        bucket_bytes: int = BUCKET_BYTES,
        wire: str = "",
    ) -> None:
        by_group: dict[str, tuple[ProcessGroup, list[nn.Parameter]]] = {}
        for parameters, group in parts:
            if group is not None and group_size(group) > 1:
                found = by_group.setdefault(group_name(group), (group, []))[1]
                found.extend(parameter for parameter in parameters if parameter.requires_grad)
        self._lanes = [_Lane(group, _buckets(found, bucket_bytes, group), wire) for group, found in by_group.values()]
        self._active = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(lane, bucket))
            for lane in self._lanes
            for bucket in lane.buckets
            for parameter in bucket.parameters
        ]

    @property
    def group(self) -> ProcessGroup | None:
        """The first group over which gradients are averaged."""
        return self._lanes[0].group if self._lanes else None

    def _together(self) -> FailTogether:
        return FailTogether(monitor_of(self.group), "the average of gradients", keeps_type=True)

    def _hook(self, lane: _Lane, bucket: _Bucket) -> Any:
        def note(parameter: Tensor) -> None:
            if self._active:
                bucket.missing.discard(id(parameter))
                lane.send()

        return note

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Context of the last backward pass of an optimizer step; afterwards gradients are averages."""
        self.begin()
        try:
            with self._together():
                yield
        finally:
            self._active = False
        self.finish()

    @torch.no_grad()
    def require_equal_parameters(self) -> None:
        """Raise UsageError, on all ranks, where a parameter is not equal to the bit on the ranks of its group."""
        for lane in self._lanes:
            held = [each for bucket in lane.buckets for each in bucket.parameters]
            parts = [part_of_rank(each).flatten() for each in held]
            bits = [part.view(_INTEGERS.get(part.element_size(), torch.int64)) for part in parts]
            sums = torch.stack([each.sum(dtype=torch.int64) for each in bits])
            sums = torch.cat([sums, -sums])
            all_reduce(sums, lane.group, "bits of parameters", largest=True)
            apart = (sums[: len(held)] != -sums[len(held) :]).nonzero().flatten().tolist()
            if apart:
                raise UsageError(
                    f"{len(apart)} parameters, such as one of shape {list(held[apart[0]].shape)}, differ between "
                    "replicas: a rank has changed them alone, by random numbers, another learning rate or a step "
                    "that others left out; change them alike on all ranks"
                )

    def begin(self) -> None:
        """Send each bucket once its gradients are complete, until `finish`."""
        for lane in self._lanes:
            lane.reset()
        self._active = True

    def finish(self) -> None:
        """Send the other buckets and replace all gradients by the averages."""
        self._active = False
        with self._together():
            for lane in self._lanes:
                lane.send(flush=True)
            for lane in self._lanes:
                lane.receive()

    def begin_pass(self, part: int | None) -> None:
        """Do nothing: gradients of a pass accumulate."""

    def end_pass(self) -> None:
        """Do nothing: gradients of a pass accumulate."""

    def forget(self) -> None:
        """Send nothing more in a step that failed."""
        self._active = False

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._lanes, self._handles = [], []


def _buckets(parameters: list[nn.Parameter], bucket_bytes: int, group: ProcessGroup) -> list[_Bucket]:
    """Buckets from the last parameter, whose gradient comes first; each parameter once, one type per bucket."""
    buckets: list[list[nn.Parameter]] = []
    used, kind = 0, None
    for parameter in reversed(list(dict.fromkeys(parameters))):
        dtype = parameter.grad_dtype or parameter.dtype  # None allows any type
        size = part_of_rank(parameter).numel() * dtype.itemsize
        if not buckets or used + size > bucket_bytes or (dtype, parameter.device) != kind:
            buckets.append([])
            used, kind = 0, (dtype, parameter.device)
        buckets[-1].append(parameter)
        used += size
    where = f"gradients over {group_size(group)} ranks, bucket"
    return [_Bucket(bucket, f"{where} {number}") for number, bucket in enumerate(buckets)]
