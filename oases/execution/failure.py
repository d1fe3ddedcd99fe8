"""An op that fails on one rank fails on all: nobody waits for a collective that never starts.

The rank where an op raises writes so into the group's store. A thread on every rank looks there twice a second, which
is all that a step without failures pays. It then

1. halts this rank's scheduler and writes how many collectives were started here, and which the last ones were;
2. starts, with zeros, what others started and this rank did not: so every collective under way ends, on gloo as on
   NCCL, and no memory is freed that a backend still writes to;
3. waits for that, and for the others' word that it is so with them. Nobody's numbers are used.

Main threads take no part and are not interrupted. One that waits inside a collective or for the device gets out when
that collective ends; its next call of the scheduler raises, or the one it is in, in a stack or outside of one.
Afterwards all ranks have started the same collectives, and the group can be used again.

Where this cannot be done (a rank does not answer, a collective is under way that went not by the scheduler, memory is
out even for zeros), the threads abort the process group as the last resort. Errors are raised even then: NCCL's abort
ends its kernels; gloo has none, so a rank that waits outside of the scheduler waits for gloo's timeout.

What raises outside of a stack's schedule (a loss, a hook, an optimizer) is not told to the others.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_of

_INTERVAL_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
"""How long a rank's thread may take to say where it stands."""
_DRAIN_SECONDS = 20.0
"""How long the collectives under way may take to end."""
_SETTLED = "settled"


@dataclass(frozen=True)
class Failure:
    """What failed: the rank within its group, the op and its line, the first line of the cause, what to do."""

    rank: int
    where: str
    cause: str
    remedy: str
    out_of_memory: bool

    def __str__(self) -> str:
        what = "ran out of memory" if self.out_of_memory else "failed"
        return f"rank {self.rank} {what} at {self.where}: {self.cause}{self.remedy}"


class FailedRankError(RuntimeError):
    """An op of a schedule failed on one rank; it is raised on every rank of the group.

    On the rank that failed, `__cause__` is what its op raised. The step's gradients are to be dropped. failure: what
    failed. usable: whether the stack can be called again; if not, the group was aborted.
    """

    failure: Failure
    usable: bool


class FailedRankMemoryError(FailedRankError, torch.OutOfMemoryError):
    """The same where memory ran out, so that `except torch.OutOfMemoryError` catches it on every rank."""


def error_of(failure: Failure, broken: str, size: int) -> FailedRankError:
    """The error that every rank of a group of this size raises. broken: why the group was aborted, "" if not."""
    text = str(failure)
    if broken:
        text += f". The process group was aborted ({broken}): make it anew, or start the run again"
    else:
        text += ". " + ("" if size == 1 else "All ranks raise this; ")
        text += "drop this step's gradients, then the stack can be called again"
    error = (FailedRankMemoryError if failure.out_of_memory else FailedRankError)(text)
    error.failure, error.usable = failure, not broken
    return error


class FailureMonitor:
    """Looks after one process group on this rank: its thread does what this module's docstring says.

    device: where the group's tensors lie. incarnation: tells groups of one name that came one after another apart.
    """

    def __init__(self, group: ProcessGroup, scheduler: Any, device: torch.device, incarnation: int) -> None:
        self.scheduler = scheduler
        self.rank, self.size = group.rank(), group.size()
        self.failure: Failure | None = None
        self._broken = ""
        self._device = device
        self._name = group.group_name  # not the group: that would keep it from being destroyed
        store: Any = _get_process_group_store(group)
        # A HashStore is one process's own: the others are only pretended, as those of torch's fake backend.
        alone = isinstance(_innermost(store), dist.HashStore) or dist.get_backend(group) == "fake"
        self._ranks = [self.rank] if alone else list(range(self.size))
        # A copy, because a client is locked while another thread uses it.
        self._store: dist.Store = dist.HashStore() if alone else store.clone()
        self._prefix = f"oases/failure/{self._name}/{incarnation}"
        self._settled = 0
        self._wake = threading.Event()
        self._stopped = False
        scheduler.renew()
        self._thread = threading.Thread(target=self._serve, name="oases-failure-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def fail(self, failure: Failure) -> str:
        """Tell every rank; return when the collectives have ended: "", or why the group was aborted."""
        self.report_failure(failure)
        return str(self.scheduler.acknowledge())

    def report_failure(self, failure: Failure) -> None:
        """Tell every rank; the main thread then has to acknowledge."""
        key = self._key("failure")  # before the halt, which another rank's failure may have begun and ended
        if self.scheduler.halt(str(failure), failure.out_of_memory).newly:
            try:
                self._store.compare_set(key, "", json.dumps(asdict(failure)))
                lost = "" if self._thread.is_alive() else "the group's store was lost before"
            except (RuntimeError, OSError) as error:
                lost = f"the group's store is lost: {error}"
            if lost:
                self._give_up(lost)
            self._wake.set()

    def check(self) -> None:
        """Raise what another rank raised, if this one has not heard of it yet."""
        try:
            self.scheduler.check()
        except RuntimeError as error:
            raise self.error() from error

    def error(self) -> FailedRankError:
        """For a rank that was stopped: the error of the rank that failed."""
        assert self.failure is not None, "the thread has read it before it halted the scheduler"
        return error_of(self.failure, self._broken, self.size)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._settled}/{name}"

    def _serve(self) -> None:
        try:
            while True:
                self._wake.wait(_INTERVAL_SECONDS)
                self._wake.clear()
                if self._stopped:
                    return
                if self._store.check([self._key("failure")]):
                    self._settle()
                    if self._broken:
                        return
        except (RuntimeError, OSError):
            return  # the store is gone, and with it the rank or launcher that held it; fail() says so

    def _settle(self) -> None:
        self.failure = Failure(**json.loads(self._store.get(self._key("failure"))))
        standing = self.scheduler.halt(str(self.failure), self.failure.out_of_memory)
        try:
            try:
                self._bring_to_one_end(standing)
                mine = _SETTLED
            except Exception as error:  # whatever it is, the group cannot be used and all must hear why
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
        """Let every collective that any rank has started end on every rank. Any exception says why that failed."""
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
            raise RuntimeError("a collective is under way that was not started by oases")
        missing = furthest["started"] - standing.started
        # On a GPU not behind the main thread's work, which may wait for a collective of another group.
        aside = torch.cuda.stream(torch.cuda.Stream(self._device)) if self._device.type == "cuda" else nullcontext()
        with aside:
            for ago in range(missing, 0, -1):
                collective, numel, dtype, kind, *splits, _ = furthest["last"][-ago]
                if any(splits):  # of what others started all to all, this rank's part
                    numel, splits = 0, _answers(everyone, furthest["started"] - ago, self.rank)
                device = self._device if self._device.type == kind else torch.device(kind)
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
                raise RuntimeError("another rank gave up")  # its verdict came first and counts
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
            self._broken += f"; to abort it failed, too: {error}"
        self.scheduler.resume(self._broken)


def _foreign_since(standing: dict[str, Any], common: int) -> int:
    """What others started on a rank's group since the last collective that all ranks have started here."""
    if common == 0:
        return int(standing["foreign"] - standing["foreign_at_first"])
    *_, then = standing["last"][common - 1 - standing["started"]]
    return int(standing["foreign"] - then)


def _answers(everyone: list[dict[str, Any]], number: int, rank: int) -> list[list[int]]:
    """(numbers to send, numbers to receive) by which `rank` answers all ranks' all-to-all of this number."""
    sent, received = [0] * len(everyone), [0] * len(everyone)
    for other, each in enumerate(everyone):
        if each["started"] > number:
            *_, sends, receives, _ = each["last"][number - each["started"]]
            sent[other], received[other] = receives[rank], sends[rank]
    return [sent, received]


_monitors: WeakKeyDictionary[ProcessGroup, FailureMonitor] = WeakKeyDictionary()
_incarnations: Counter[str] = Counter()


def monitor_of(group: ProcessGroup, scheduler: Any, device: torch.device) -> FailureMonitor:
    """The monitor of a group, started when it is first asked for; it ends with the group or the process.

    scheduler: the group's OverlapScheduler.
    """
    if group not in _monitors:
        _incarnations[group.group_name] += 1
        monitor = _monitors[group] = FailureMonitor(group, scheduler, device, _incarnations[group.group_name])
        finalize(group, monitor.stop)
    return _monitors[group]


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


@contextmanager
def fail_together(
    monitor: FailureMonitor | None, where: str, unanimous: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Raise an exception of the body on every rank of the group; all ranks must enter it at the same point.

    monitor: the group's; None for a group of one. where: the failed operation, for the message. unanimous: exception
    types that all ranks raise by themselves. A UsageError keeps its type on the rank that raises it.
    """
    before = monitor.scheduler.failures if monitor is not None else 0
    try:
        yield
    except Exception as error:
        if monitor is None or isinstance(error, (FailedRankError, *unanimous)):
            raise
        if monitor.scheduler.failures != before:  # the scheduler stopped this rank
            raise monitor.error() from error
        if lost_a_rank(error):
            raise
        first_line = (str(error).strip().splitlines() or [""])[0]
        cause = f"{type(error).__name__}: {first_line}"
        failure = Failure(monitor.rank, where, cause, "", is_out_of_memory(error))
        broken = monitor.fail(failure)
        if isinstance(error, UsageError):
            raise
        raise error_of(failure, broken, monitor.size) from error


def lost_a_rank(error: Exception) -> bool:
    """Whether a link or a rank is gone: no op's failure."""
    # Collectives outside the scheduler (barriers, object exchange) fail with gloo's bare RuntimeError.
    return isinstance(error, dist.DistBackendError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def is_out_of_memory(error: Exception) -> bool:
    """Whether an op found no memory."""
    # On the CPU torch raises a RuntimeError that is known by its text alone.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: " in str(error)
