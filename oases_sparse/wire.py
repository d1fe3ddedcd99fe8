"""Collectives of sparse gradients over a group of their own, with the bytes of their ring algorithms."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Reduction:
    """Reduction of one tensor in one step, on this rank.

    mode: the mode that was used. bytes: sent by this rank, by ring formulas; dense_bytes: those of a dense
    all-reduce. union: rows that any rank has, of `rows`; None where unknown. encode_seconds and decode_seconds: this
    rank's compute; send_seconds: from the start of a collective to its wait's end, including other work; seconds: in
    total. phases: sequential rounds of collectives. fallback: why another mode than the requested one was used, or
    "". error: relative L2 error against the exact mean; None unless measured.
    """

    name: str
    mode: str
    rows: int = 0
    union: int | None = None
    bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    encode_seconds: float = 0.0
    send_seconds: float = 0.0
    decode_seconds: float = 0.0
    phases: int = 0
    fallback: str = ""
    error: float | None = None


@dataclass
class Account:
    """Sums over the reductions of one tensor. bytes: sent; dense_bytes: those of a dense all-reduce."""

    name: str
    steps: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    encode_seconds: float = 0.0
    send_seconds: float = 0.0
    decode_seconds: float = 0.0
    worst_error: float | None = None

    def add(self, found: Reduction) -> None:
        """Add one reduction."""
        self.steps += 1
        self.modes[found.mode] += 1
        if found.fallback:
            self.fallbacks[found.fallback] += 1
        for name in ("bytes", "dense_bytes", "seconds", "encode_seconds", "send_seconds", "decode_seconds"):
            setattr(self, name, getattr(self, name) + getattr(found, name))
        if found.error is not None:
            self.worst_error = max(found.error, self.worst_error or 0.0)


@dataclass
class Report:
    """Accounts by tensor, in order of first use; prints as a table. title: of the section."""

    accounts: list[Account]
    title: str = "sparse gradients"

    @property
    def bytes(self) -> int:
        """Bytes sent by this rank, over all tensors."""
        return sum(account.bytes for account in self.accounts)

    @property
    def saved(self) -> float | None:
        """Fraction of dense all-reduce's bytes that was not sent; None where that sends nothing either."""
        dense = sum(account.dense_bytes for account in self.accounts)
        return 1 - self.bytes / dense if dense else None

    def json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            asdict(account) | {"modes": dict(account.modes), "fallbacks": dict(account.fallbacks)}
            for account in self.accounts
        ]
        return {"bytes": self.bytes, "saved": self.saved, "tensors": rows}

    def __str__(self) -> str:
        lines = [
            f"{'tensor':28} {'steps':>6} {'MB/step':>9} {'of dense':>9} {'enc ms':>7} {'send':>7} {'dec':>7}  modes"
        ]
        for one in self.accounts:
            steps = max(1, one.steps)
            share = f"{one.bytes / one.dense_bytes:.1%}" if one.dense_bytes else "-"
            times = [
                f"{1e3 * one_time / steps:7.2f}"
                for one_time in (one.encode_seconds, one.send_seconds, one.decode_seconds)
            ]
            modes = ", ".join(f"{mode} {count}" for mode, count in one.modes.items())
            why = "; ".join(f"{reason} ({count})" for reason, count in one.fallbacks.items())
            lines.append(
                f"{one.name:28} {one.steps:6} {one.bytes / steps / 1e6:9.3f} {share:>9} {' '.join(times)}  {modes}"
                + (f"; fell back: {why}" if why else "")
            )
        return "\n".join(lines)


class Sending:
    """Started collective; `wait` returns its result and records its seconds."""

    def __init__(self, work: Any, result: Callable[[], Tensor], found: Reduction) -> None:
        self.work, self.result, self._found = work, result, found
        self._start = time.perf_counter()

    def wait(self) -> Tensor:
        """Wait for the result; on a GPU the stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        self._found.send_seconds += time.perf_counter() - self._start
        return self.result()


class Wire:
    """Ranks that reduce together. Without a process group, this process alone.

    Creates a new group of the same ranks: its collectives are called from a thread besides DDP's, and two threads of
    one group would have to agree on an order with all ranks. Collective: all ranks create theirs at the same point.
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
            self._knows_or = dist.get_backend(group) in ("gloo", "staged")
            # torch names a subgroup by a rank's number of groups, which may differ between ranks.
            alone = len(ranks) < dist.get_world_size()
            self.group = dist.new_group(ranks, use_local_synchronization=alone)

    def reduced_bytes(self, size: int) -> int:
        """Bytes that a rank sends for a ring all-reduce of `size` bytes."""
        return 2 * (self.world - 1) * size // self.world

    def united_bytes(self, size: int) -> int:
        """Bytes that a rank sends for the union of bitmaps of `size` bytes."""
        return self.reduced_bytes(size) if self.world == 1 or self._knows_or else (self.world - 1) * size

    def sum(self, tensor: Tensor, found: Reduction) -> Sending:
        """Sum over the ranks, in place."""
        found.bytes += self.reduced_bytes(tensor.numel() * tensor.element_size())
        work = dist.all_reduce(tensor, group=self.group, async_op=True) if self.world > 1 else None
        return Sending(work, lambda: tensor, found)

    def unite(self, bits: Tensor, found: Reduction) -> Sending:
        """Bitwise OR of uint8 over the ranks; by an all-gather for backends without OR, such as NCCL."""
        found.bytes += self.united_bytes(bits.numel())
        if self.world == 1:
            return Sending(None, lambda: bits, found)
        if self._knows_or:
            work = dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=self.group, async_op=True)
            return Sending(work, lambda: bits, found)
        gathering = self.gather(bits, Reduction("", ""))  # its bytes were counted above
        return Sending(gathering.work, lambda: or_of(gathering.result()), found)

    def gather(self, tensor: Tensor, found: Reduction) -> Sending:
        """Tensors of all ranks, [world, ...], of equal shapes."""
        found.bytes += (self.world - 1) * tensor.numel() * tensor.element_size()
        every = tensor.new_empty(self.world * tensor.shape[0], *tensor.shape[1:])
        # Its names since torch 2.13 and before.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(every, tensor, group=self.group, async_op=True)
        return Sending(work, lambda: every.view(self.world, *tensor.shape), found)

    def worst(self, numbers: list[float], device: torch.device) -> list[float]:
        """Maximum of each number over the ranks, so that all use the same."""
        if self.world == 1:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float32, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return [float(number) for number in shared.tolist()]


def or_of(every: Tensor) -> Tensor:
    """Union of bitmaps [world, bytes]."""
    bits = every[0].clone()
    for other in every[1:]:
        bits |= other
    return bits
