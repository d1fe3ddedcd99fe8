"""Failure protocol: an op that fails on one rank raises an error on all, and no rank waits for ever in a collective.

The failing rank writes the failure to the group's store. A monitor thread on every rank polls the store twice a
second, which is the only cost of a step without failures. On a failure it

1. halts this rank's scheduler and writes how many collectives this rank has started, and the latest ones;
2. starts, with zeros, the collectives that others have started and this rank has not: every pending collective
   completes, on gloo as on NCCL, and no memory is freed that a backend still writes to;
3. waits for their completion on all ranks. The results are not used. On an accelerator a rank's host may have gone on
   to the optimizer's step meanwhile: there they are filled with NaN, so that no sum is silently wrong.

Main threads take no part and are not interrupted. One that waits inside a collective or for the device continues when
that collective completes; the current or next call of the scheduler then raises, in a stack or outside of one.
Afterwards all ranks have started the same collectives, and the group can be used again.

Where that is impossible (a rank does not answer, a pending collective was not started by the scheduler, no memory
even for zeros), the monitors abort the process group. Errors are raised even then: NCCL's abort ends its kernels;
gloo has no abort, so a rank that waits outside of the scheduler waits for gloo's timeout.

Exceptions around stacks are propagated by `oases.core.execution.propagation`; those of an optimizer are not.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from oases.core.execution.agreement import CallAgreement, Form, Samples
from oases.core.execution.group import HoldsGroup, ProcessGroup, group_of
from oases.errors import UsageError

_INTERVAL_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
"""Time limit for a rank's thread to answer."""
_DRAIN_SECONDS = 20.0
"""Time limit for pending collectives to complete."""
_SETTLED = "settled"
NO_PASS = -1
"""Number of torch outside of backward passes."""


@dataclass(frozen=True)
class Failure:
    """Rank within its group, op and line, first line of the cause, remedy."""

    rank: int
    where: str
    cause: str
    remedy: str
    out_of_memory: bool

    @classmethod
    def of(cls, error: BaseException, rank: int, where: str, remedy: str = "") -> Failure:
        """Describe an exception. remedy: of an op that ran out of memory."""
        lines = str(error).strip().splitlines() or [""]
        full = is_out_of_memory(error)
        return cls(rank, where, f"{type(error).__name__}: {lines[0]}", remedy if full else "", full)

    def __str__(self) -> str:
        what = "ran out of memory" if self.out_of_memory else "failed"
        return f"rank {self.rank} {what} at {self.where}: {self.cause}{self.remedy}"


class FailedRankError(RuntimeError):
    """An op of a schedule failed on one rank; raised on every rank of the group.

    On the failing rank `__cause__` is the op's exception. Drop the step's gradients. failure: description. usable:
    whether the stack can be called again; otherwise the group was aborted.
    """

    failure: Failure
    usable: bool


class FailedRankMemoryError(FailedRankError, torch.OutOfMemoryError):
    """FailedRankError for an out-of-memory error; `except torch.OutOfMemoryError` catches it on every rank."""


def error_of(failure: Failure, broken: str, size: int, *, went_on: bool = False) -> FailedRankError:
    """Error that every rank of a group of this size raises.

    broken: why the group was aborted, or "". went_on: whether this rank had ended its call before.
    """
    text = str(failure)
    if broken:
        text += f". The process group was aborted ({broken}): create a new one, or restart the run"
    else:
        text += ". " + ("" if size == 1 else "All ranks raise this; ")
        text += "drop this step's gradients, then the stack can be called again"
    if went_on:
        text += (
            ". This rank had ended its call, and knows of the failure since its next one: if it made an optimizer "
            "step meanwhile, load a checkpoint, and call the stack's confirm() before such steps"
        )
    error = (FailedRankMemoryError if failure.out_of_memory else FailedRankError)(text)
    error.failure, error.usable = failure, not broken
    return error


class FailureMonitor:
    """Monitors one process group on this rank; its thread runs the protocol of this module's docstring.

    device: of the group's tensors. incarnation: distinguishes successive groups of one name.
    """

    def __init__(self, group: ProcessGroup, scheduler: Any, device: torch.device, incarnation: int) -> None:
        self.scheduler = scheduler
        self.rank, self.size = group.rank(), group.size()
        self.failure: Failure | None = None
        self.watched = NO_PASS
        """Number of the backward pass that is watched; see `oases.core.execution.propagation`."""
        self._broken = ""
        # The monitor's thread has a current device of its own, the first.
        self._index = device.index
        if self._index is None and torch.accelerator.is_available():
            self._index = torch.accelerator.current_device_index()
        self._name = group.group_name  # not the group itself: a reference would keep it from being destroyed
        store: Any = _get_process_group_store(group)
        # A HashStore belongs to one process: the other ranks are simulated, as with torch's fake backend.
        alone = isinstance(_innermost(store), dist.HashStore) or dist.get_backend(group) == "fake"
        self._ranks = [self.rank] if alone else list(range(self.size))
        # A clone, because a store client is locked while another thread uses it.
        self._store: dist.Store = dist.HashStore() if alone else store.clone()
        self._prefix = f"oases/failure/{self._name}/{incarnation}"
        self._settled = 0
        self._process = os.getpid()
        self._calls = CallAgreement(self._store, f"{self._prefix}/calls", self.rank, self._ranks)
        self._wake = threading.Event()
        self._stopped = False
        scheduler.renew()
        self._thread = threading.Thread(target=self._serve, name="oases-failure-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def fail(self, failure: Failure) -> str:
        """Notify every rank and wait until pending collectives have completed; "", or why the group was aborted."""
        self.report_failure(failure)
        return str(self.scheduler.acknowledge())

    def report_failure(self, failure: Failure) -> None:
        """Notify every rank; the main thread must then acknowledge."""
        key = self._key(
            "failure"
        )  # before halt(), because another failure may be settled meanwhile and change the key
        if self.scheduler.halt(str(failure), failure.out_of_memory).newly:
            try:
                self._store.compare_set(key, "", json.dumps(asdict(failure)))
                lost = "" if self._thread.is_alive() else "the group's store was lost before"
            except (RuntimeError, OSError) as error:
                lost = f"the group's store is lost: {error}"
            if lost:
                self._give_up(lost)
            self._wake.set()

    def begin_call(self, caller: str, form: Form, samples: Samples | None = None, about: Form = ()) -> None:
        """Begin a call whose collectives all ranks start; see `CallAgreement.begin`.

        UsageError, on all ranks, where their forms or samples differ; FailedRankError where a rank is in its call
        already. RuntimeError in a fork of the process that created the group.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{caller} was called in a fork of the process that created its process group, whose connections and "
                "threads a fork does not have; start processes by spawn, or create group and model after the fork"
            )
        found = self._calls.begin((caller, about), form, self.scheduler.failures, samples, self.check)
        if found is None:
            return
        if not found.stuck:
            raise UsageError(f"{caller}: {found.text}")
        failure = Failure(self.rank, caller, found.text, "", False)
        raise error_of(failure, self.fail(failure), self.size)

    def check(self, *, went_on: bool = True) -> None:
        """Raise another rank's failure, if there is one. went_on: this rank has ended the call that failed."""
        try:
            self.scheduler.check()
        except RuntimeError as error:
            raise self.error(went_on=went_on) from error

    def confirm(self) -> None:
        """Wait for what is queued on the current stream, then `check` the call that queued it."""
        if self._index is not None:
            torch.accelerator.current_stream(self._index).synchronize()
        self.check(went_on=False)

    def error(self, *, went_on: bool = False) -> FailedRankError:
        """Error of the failed rank, for a rank that was stopped."""
        assert self.failure is not None, "the thread has read it before it halted the scheduler"
        return error_of(self.failure, self._broken, self.size, went_on=went_on)

    @property
    def link_lost(self) -> bool:
        """Whether this rank's wait for a collective failed, in any group. False where waits are the device's."""
        # The host's thread leaves the text in place where the wait fails. It waits for nothing else now.
        return self._index is None and any(each.waiting_for() for each in type(self.scheduler).all().values())

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._settled}/{name}"

    def _serve(self) -> None:
        try:
            while True:
                self._wake.wait(_INTERVAL_SECONDS)
                self._wake.clear()
                if self._stopped:
                    return
                self._calls.answer()
                if self._store.check([self._key("failure")]):
                    self._settle()
                    if self._broken:
                        return
        except (RuntimeError, OSError):
            return  # the store is gone, with the rank or launcher that held it; fail() reports it

    def _settle(self) -> None:
        self.failure = Failure(**json.loads(self._store.get(self._key("failure"))))
        standing = self.scheduler.halt(str(self.failure), self.failure.out_of_memory)
        try:
            try:
                self._bring_to_one_end(standing)
                mine = _SETTLED
            except Exception as error:  # any error makes the group unusable; publish it as the verdict
                mine = f"rank {self.rank}: {error}"
            verdict = self._store.compare_set(self._key("verdict"), "", mine).decode()
        except (RuntimeError, OSError) as error:
            verdict = f"the group's store is lost: {error}"
        if verdict != _SETTLED:
            self._give_up(verdict)
            return
        self._settled += 1
        self.scheduler.resume()

    def _bring_to_one_end(self, standing: Any) -> None:
        """Complete every started collective on every rank. Any exception gives the reason why that failed."""
        last = [
            (s.collective, s.numel, str(s.dtype).removeprefix("torch."), s.device.type, s.sent, s.received, s.foreign)
            for s in standing.last
        ]
        mine = {"started": standing.started, "last": last}
        mine |= {"foreign": standing.foreign, "foreign_at_first": standing.foreign_at_first}
        self._store.set(self._key(f"standing/{self.rank}"), json.dumps(mine))
        everyone = [json.loads(text) for text in self._gather("standing", _ANSWER_SECONDS)]
        furthest = max(everyone, key=lambda each: int(each["started"]))
        common = min(each["started"] for each in everyone)
        apart = furthest["started"] - common
        if apart + (common > 0) > len(furthest["last"]):
            raise RuntimeError(f"the ranks are {apart} collectives apart")
        if len({_foreign_since(each, common) for each in everyone}) > 1:
            raise RuntimeError("a pending collective was not started by oases")
        missing = furthest["started"] - standing.started
        for ago in range(missing, 0, -1):
            collective, numel, dtype, kind, *splits, _ = furthest["last"][-ago]
            if any(splits):  # all-to-all: the sizes are those of this rank
                numel, splits = 0, _answers(everyone, furthest["started"] - ago, self.rank)
            device = torch.device(kind) if kind == "cpu" else torch.device(kind, self._index)
            # On an accelerator use another stream: the main thread's may wait for a collective of another group.
            with nullcontext() if kind == "cpu" else torch.Stream(device):
                whole = torch.zeros(numel, dtype=getattr(torch, dtype), device=device)
                self.scheduler.fill(collective, whole, *splits)
        why = self.scheduler.drain(_DRAIN_SECONDS)
        if why:
            raise RuntimeError(why)
        self._store.set(self._key(f"done/{self.rank}"), "1")
        self._gather("done", _ANSWER_SECONDS + _DRAIN_SECONDS)

    def _gather(self, name: str, patience_seconds: float) -> list[bytes]:
        keys = [self._key(f"{name}/{rank}") for rank in self._ranks]
        end = time.monotonic() + patience_seconds
        while not self._store.check(keys):
            if self._store.check([self._key("verdict")]):
                raise RuntimeError("another rank gave up")  # its verdict was first and is final
            if time.monotonic() > end:
                gone = [
                    str(rank) for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])
                ]
                raise TimeoutError(f"no answer from rank {', '.join(gone)} within {patience_seconds:.0f} s")
            time.sleep(0.02)
        return [self._store.get(key) for key in keys]

    def _give_up(self, why: str) -> None:
        self._broken = why
        try:
            group = group_of(self._name)
            if group is not None:
                group.abort()
        except RuntimeError as error:
            self._broken += f"; the abort failed, too: {error}"
        self.scheduler.resume(self._broken)


def _foreign_since(standing: dict[str, Any], common: int) -> int:
    """Collectives started outside of the scheduler since the last one that all ranks have started."""
    if common == 0:
        return int(standing["foreign"] - standing["foreign_at_first"])
    *_, then = standing["last"][common - 1 - standing["started"]]
    return int(standing["foreign"] - then)


def _answers(everyone: list[dict[str, Any]], number: int, rank: int) -> list[list[int]]:
    """(numbers to send, numbers to receive) with which `rank` completes the all-to-all of this number."""
    sent, received = [0] * len(everyone), [0] * len(everyone)
    for other, each in enumerate(everyone):
        if each["started"] > number:
            *_, sends, receives, _ = each["last"][number - each["started"]]
            sent[other], received[other] = receives[rank], sends[rank]
    return [sent, received]


_monitors: WeakKeyDictionary[ProcessGroup, FailureMonitor] = WeakKeyDictionary()
_incarnations: Counter[str] = Counter()


def monitor_of(group: ProcessGroup, scheduler: Any, device: torch.device) -> FailureMonitor:
    """Monitor of a group, started on first use; it ends with the group or the process.

    scheduler: the group's OverlapScheduler.
    """
    if group not in _monitors:
        _incarnations[group.group_name] += 1
        monitor = _monitors[group] = FailureMonitor(group, scheduler, device, _incarnations[group.group_name])
        finalize(group, monitor.stop)
    return _monitors[group]


def known_monitor(group: ProcessGroup | None) -> FailureMonitor | None:
    """Monitor of a group that has one."""
    return None if group is None else _monitors.get(group)


def stop_monitor(group: ProcessGroup) -> None:
    """Stop the monitor of a group that stays idle; the next use of the group starts another. All ranks call it."""
    monitor = _monitors.pop(group, None)
    if monitor is not None:
        monitor.stop()


class FailsTogether(HoldsGroup):
    """Mixin of a module whose calls fail on all ranks of its group, or on none."""

    def confirm(self) -> None:
        """Wait for the device's queued work; raise FailedRankError if another rank has failed.

        For a loop of your own, before `optimizer.step()`: on an accelerator `backward()` returns before its
        collectives have ended, and a rank that fails meanwhile leaves NaN in the others' sums. On the CPU nothing is
        waited for.
        """
        monitor = known_monitor(self.process_group)
        if monitor is not None:
            monitor.confirm()


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def lost_a_rank(error: BaseException) -> bool:
    """Whether a link or a rank is gone, rather than an op has failed."""
    # Collectives outside the scheduler (barriers, object exchange) fail with gloo's bare RuntimeError.
    # A lost connection to the store is a DistNetworkError.
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        type(error) is RuntimeError and "gloo" in str(error).lower()
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an op ran out of memory."""
    # On the CPU torch raises a RuntimeError, recognisable by its text alone.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: " in str(error)
