"""Data parallelism: gradients averaged over the ranks that hold the same parameters, while the backward pass runs.

Not by torch's DistributedDataParallel, for three reasons. It gets ready for a backward pass in the forward pass
before it, so where forward passes run ahead of backward passes, as in a pipeline, it would send the sums of the wrong
micro-batch. One wrapper has one group and one module's forward pass: a model whose segments have groups of their own,
and whose embedding is used again behind them, would have to be cut for it. And its collectives are not tickets, so
`oases.report()` could not say whether they were hidden, nor a run that ends which of them a rank waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oases.execution.group import ProcessGroup, group_name, group_of, group_size, scheduler_of
from oases.plans.plan import BUCKET_BYTES


class _Bucket:
    """Parameters whose gradients are sent together, and what of them is on its way."""

    def __init__(self, parameters: list[nn.Parameter], label: str) -> None:
        self.parameters = parameters
        self.label = label
        self.missing = {id(parameter) for parameter in parameters}
        self.sent: tuple[Any, Tensor] | None = None

    def reset(self) -> None:
        self.missing = {id(parameter) for parameter in self.parameters}
        self.sent = None

    def gradients(self) -> list[Tensor]:
        """Zeros for a parameter that was not used here: other ranks may have used it."""
        found = []
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            found.append(parameter.grad)
        return found


class _Lane:
    """The buckets of one group. They start in their order, whichever is full first, the same on every rank."""

    def __init__(self, group: ProcessGroup, buckets: list[_Bucket]) -> None:
        self._group_name = group_name(group)
        self.buckets = buckets
        self._next = 0

    @property
    def _scheduler(self) -> Any:
        group = group_of(self._group_name)
        assert group is not None
        return scheduler_of(group)

    def reset(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def send(self, *, all_of_them: bool = False) -> None:
        """Start the sums of the buckets that are full, up to the first that is not."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and not all_of_them:
                return
            flat = torch.cat([gradient.flatten() for gradient in bucket.gradients()])
            bucket.sent = (self._scheduler.all_reduce(flat, bucket.label), flat)
            self._next += 1

    def receive(self) -> None:
        """Wait for all sums and write the averages over the gradients."""
        size = self._scheduler.size
        for bucket in self.buckets:
            assert bucket.sent is not None
            ticket, flat = bucket.sent
            bucket.sent = None
            self._scheduler.wait(ticket)
            gradients = bucket.gradients()
            parts = flat.div_(size).split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])


class GradientAverager:
    """Averages gradients over data-parallel groups, overlapped with the backward pass that completes them.

        for tokens in earlier_micro_batches:
            model.loss(tokens).backward()                # gradients accumulate, nothing is sent
        with average.overlapped():
            model.loss(last_micro_batch).backward()      # sent bucket by bucket; averages when the block ends

    parts: (parameters, group) for each part of the model, in the order of its forward pass; parts of one group
    are sent together, those without a group or with a group of one stay as they are. Make it once the model is where
    it stays: hooks hang on its parameters. bucket_bytes: how much is sent at once.
    """

    def __init__(
        self, parts: Iterable[tuple[Iterable[nn.Parameter], ProcessGroup | None]], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        by_group: dict[str, tuple[ProcessGroup, list[nn.Parameter]]] = {}
        for parameters, group in parts:
            if group is not None and group_size(group) > 1:
                found = by_group.setdefault(group_name(group), (group, []))[1]
                found.extend(parameter for parameter in parameters if parameter.requires_grad)
        self._lanes = [_Lane(group, _buckets(found, bucket_bytes, group)) for group, found in by_group.values()]
        self._active = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(lane, bucket))
            for lane in self._lanes
            for bucket in lane.buckets
            for parameter in bucket.parameters
        ]

    def _hook(self, lane: _Lane, bucket: _Bucket) -> Any:
        def note(parameter: Tensor) -> None:
            if self._active:
                bucket.missing.discard(id(parameter))
                lane.send()

        return note

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Around the last backward pass of an optimizer step; afterwards gradients are averages."""
        for lane in self._lanes:
            lane.reset()
        self._active = True
        try:
            yield
        finally:
            self._active = False
        for lane in self._lanes:
            lane.send(all_of_them=True)
        for lane in self._lanes:
            lane.receive()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._lanes, self._handles = [], []


def _buckets(parameters: list[nn.Parameter], bucket_bytes: int, group: ProcessGroup) -> list[_Bucket]:
    """Each parameter once, from the last, whose gradient comes first; one type to a bucket."""
    buckets: list[list[nn.Parameter]] = []
    used, kind = 0, None
    for parameter in reversed(list(dict.fromkeys(parameters))):
        dtype = parameter.grad_dtype or parameter.dtype  # none: any
        size = parameter.numel() * dtype.itemsize
        if not buckets or used + size > bucket_bytes or (dtype, parameter.device) != kind:
            buckets.append([])
            used, kind = 0, (dtype, parameter.device)
        buckets[-1].append(parameter)
        used += size
    where = f"gradients over {group_size(group)} ranks, bucket"
    return [_Bucket(bucket, f"{where} {number}") for number, bucket in enumerate(buckets)]
