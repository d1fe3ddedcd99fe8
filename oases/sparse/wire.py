"""The collectives of sparse gradients over a group of their own, and the bytes that a ring sends for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.sparse.accounting import Reduction


class Sending:
    """A collective under way; `wait` returns its result and books its seconds."""

    def __init__(self, work: Any, result: Callable[[], Tensor], found: Reduction) -> None:
        self.work, self.result, self._found = work, result, found
        self._start = time.perf_counter()

    def wait(self) -> Tensor:
        """On a GPU the stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        self._found.send_seconds += time.perf_counter() - self._start
        return self.result()


class Wire:
    """The ranks that reduce together. Without a process group, this process alone.

    The group is a new one over the same ranks: its collectives are called from a thread beside DDP's, and two threads
    of one group would have to agree on an order with all other ranks. All ranks must make theirs at the same point.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group: Any = None
        self.world = 1
        self.ranks: tuple[int, ...] = ()
        if group is None and not dist.is_initialized():
            return
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.world, self.ranks = len(ranks), tuple(ranks)
        if self.world > 1:
            self._knows_or = dist.get_backend(group) == "gloo"
            # One of some ranks alone torch names by how many groups a rank is in, which may differ between ranks.
            alone = len(ranks) < dist.get_world_size()
            self.group = dist.new_group(ranks, use_local_synchronization=alone)

    def reduced_bytes(self, size: int) -> int:
        """Bytes that a rank sends to all-reduce `size` bytes in a ring."""
        return 2 * (self.world - 1) * size // self.world

    def united_bytes(self, size: int) -> int:
        """Bytes that a rank sends to unite bitmaps of `size` bytes."""
        return self.reduced_bytes(size) if self.world == 1 or self._knows_or else (self.world - 1) * size

    def sum(self, tensor: Tensor, found: Reduction) -> Sending:
        """Add up over the ranks, in place."""
        found.bytes += self.reduced_bytes(tensor.numel() * tensor.element_size())
        work = dist.all_reduce(tensor, group=self.group, async_op=True) if self.world > 1 else None
        return Sending(work, lambda: tensor, found)

    def unite(self, bits: Tensor, found: Reduction) -> Sending:
        """The bitwise OR over the ranks, of uint8; by an all-gather where the backend reduces by no OR, as NCCL."""
        found.bytes += self.united_bytes(bits.numel())
        if self.world == 1:
            return Sending(None, lambda: bits, found)
        if self._knows_or:
            work = dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=self.group, async_op=True)
            return Sending(work, lambda: bits, found)
        gathering = self.gather(bits, Reduction("", ""))  # its bytes are counted already
        return Sending(gathering.work, lambda: or_of(gathering.result()), found)

    def gather(self, tensor: Tensor, found: Reduction) -> Sending:
        """The tensors of all ranks, [world, ...], of one shape on each."""
        found.bytes += (self.world - 1) * tensor.numel() * tensor.element_size()
        every = tensor.new_empty(self.world * tensor.shape[0], *tensor.shape[1:])
        # The name since torch 2.13, and that before.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(every, tensor, group=self.group, async_op=True)
        return Sending(work, lambda: every.view(self.world, *tensor.shape), found)

    def worst(self, numbers: list[float], device: torch.device) -> list[float]:
        """The largest of each number over the ranks, so that all go on from the same ones."""
        if self.world == 1:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float32, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return [float(number) for number in shared.tolist()]


def or_of(every: Tensor) -> Tensor:
    """The bitmap of the rows that any of the bitmaps [world, bytes] marks."""
    bits = every[0].clone()
    for other in every[1:]:
        bits |= other
    return bits
