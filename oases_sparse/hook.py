"""`s2_hook`: DDP communication hook that reduces buckets by an `S2Reducer`, on a thread of its own.

While the values of one bucket are sent, the next one is encoded. The order of collectives follows from the order of
buckets alone, so it is equal on every rank.
"""

# No `from __future__ import annotations`: DDP checks the types of its hook's annotations.
import queue
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases_sparse.exchange import Exchange, Steps, TensorState
from oases_sparse.reducer import S2Reducer
from oases_sparse.wire import Reduction, Sending

LEAST_ROWS = 1024
"""Minimum rows of a dense gradient that is scanned for zero rows."""
OTHERS = "all other gradients"


@dataclass
class _Bucket:
    """One of DDP's buckets. sparse: gradients that may be sparse; others: the rest, as pieces of the buffer."""

    reducer: S2Reducer
    buffer: Tensor
    sparse: list[tuple[Tensor, TensorState]]
    others: list[Tensor]
    is_last: bool
    future: Any
    event: Any
    begun: list[tuple[Steps, Exchange]] = field(default_factory=list)
    sent: list[Sending] = field(default_factory=list)
    found: Reduction = field(default_factory=lambda: Reduction(OTHERS, "dense", phases=1))

    def start(self) -> None:
        """Run until the values are being sent."""
        wire, world = self.reducer.wire, self.reducer.wire.world
        in_place = not self.buffer.is_sparse
        self.reducer.prepare(self.buffer.device)
        for gradient, memory in self.sparse:
            begun = self.reducer.begin(gradient, memory, in_place=in_place, if_sparse=in_place)
            next(begun[0])
            self.begun.append(begun)
        for piece in self.others:
            self.sent.append(wire.sum(piece.div_(world), self.found))
        for steps, _ in self.begun:
            next(steps)

    def finish(self) -> None:
        """Complete the reduction and set the future."""
        result = self.buffer
        for steps, exchange in self.begun:
            mean = self.reducer.end(steps, exchange)
            if self.buffer.is_sparse:
                result = mean
        for sending in self.sent:
            sending.wait()
        if self.sent:
            self.found.dense_bytes = self.found.bytes
            self.reducer.book(self.found)
        self.future.set_result(result)


def s2_hook(state: S2Reducer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks of the reducer: `model.register_comm_hook(oases.S2Reducer(), oases.s2_hook)`.

    Sparse gradients, and dense two-dimensional ones with many rows of which at most half are used by any rank, are
    reduced by the reducer's mode; all others by one all-reduce per bucket. Create the reducer with DDP's group.
    TypeError for a state that is not an S2Reducer.
    """
    if not isinstance(state, S2Reducer):
        raise TypeError(
            f"the state of s2_hook must be an oases.S2Reducer, got {type(state).__name__}; call "
            "model.register_comm_hook(oases.S2Reducer(), oases.s2_hook)"
        )
    buffer = bucket.buffer()
    sparse: list[tuple[Tensor, TensorState]] = []
    others: list[Tensor] = []
    if buffer.is_sparse:
        sparse.append((buffer, state.memory_of(bucket.parameters()[0])))
    else:
        sparse, others = _parted(state, buffer, bucket.parameters(), bucket.gradients())
    on_device = buffer.device.type != "cpu"
    future: Any = torch.futures.Future(devices=[buffer.device]) if on_device else torch.futures.Future()
    event = torch.accelerator.current_stream(buffer.device).record_event() if on_device else None
    if state.jobs is None:
        state.jobs = _thread(state)
    # In the first pass of static_graph=True, DDP numbers every bucket 0 and marks none as last: none may wait.
    is_last = bucket.is_last() or bucket.index() == state.last_bucket
    state.last_bucket = bucket.index()
    state.jobs.put(_Bucket(state, buffer, sparse, others, is_last, future, event))
    return future


def _parted(
    state: S2Reducer, buffer: Tensor, parameters: list[Tensor], gradients: list[Tensor]
) -> tuple[list[tuple[Tensor, TensorState]], list[Tensor]]:
    """Gradients to scan for zero rows, and the pieces of the buffer between them."""
    sparse: list[tuple[Tensor, TensorState]] = []
    others: list[Tensor] = []
    first = 0
    placed = sorted(
        zip(gradients, parameters, strict=True), key=lambda pair: pair[0].storage_offset() - buffer.storage_offset()
    )
    for gradient, parameter in placed:
        if state.settings.mode == "dense" or gradient.dim() != 2 or gradient.shape[0] < LEAST_ROWS:
            continue
        memory = state.memory_of(parameter)
        if memory.check_again:
            memory.check_again -= 1
            continue
        start = int(gradient.storage_offset() - buffer.storage_offset())
        if start > first:
            others.append(buffer[first:start])
        sparse.append((gradient, memory))
        first = start + gradient.numel()
    if first < buffer.numel():
        others.append(buffer[first:])
    return sparse, others


def _thread(reducer: S2Reducer) -> queue.SimpleQueue[_Bucket | None]:
    """Queue of buckets for a thread that lives as long as the reducer."""
    jobs: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(jobs,), name="oases sparse gradients", daemon=True).start()
    weakref.finalize(reducer, jobs.put, None)
    return jobs


def _serve(jobs: queue.SimpleQueue[_Bucket | None]) -> None:
    stream: Any = None
    before: _Bucket | None = None
    failed: Exception | None = None
    while (bucket := jobs.get()) is not None:
        if bucket.event is not None and stream is None:
            torch.accelerator.set_device_index(bucket.buffer.device)
            stream = torch.Stream(bucket.buffer.device)
        if failed is not None:
            # Other ranks may still be in the failed bucket: a new collective would pair with the wrong one.
            bucket.future.set_exception(failed)
            failed = None if bucket.is_last else failed
            del bucket
            continue
        try:
            with torch.no_grad(), stream or nullcontext():
                if bucket.event is not None:
                    stream.wait_event(bucket.event)
                bucket.start()
                if before is not None:
                    before.finish()
                if bucket.is_last:
                    bucket.finish()
            before = None if bucket.is_last else bucket
        except Exception as error:  # DDP raises it at the end of the backward pass
            for one in (before, bucket):
                if one is not None and not one.future.done():
                    one.future.set_exception(error)
            before, failed = None, None if bucket.is_last else error
        del bucket
