"""Agreement and failure of ranks: no collective starts whose calls differ, and no rank waits for ever in one.

Agreement. Collectives of unequal sizes or numbers end in an abort of the process, a wrong sum or the group's timeout.
So before a call whose form (shapes, types, modes, schedule) differs from the caller's previous one, a rank writes the
form to the group's store and waits for those of the others. A rank whose form did not change waits for nobody: if it
is in a collective already, its monitor, which polls the store, answers with the form that it runs.

Failure. An exception on one rank raises an error on every rank. The rank that fails writes its number, the op and the
cause to the store of the default group, once; the first failure of a run counts. A thread on every rank polls the
store twice a second, which is the only cost of a step without failures. When it finds a failure, or its own rank has
one, it halts the schedulers of this process, and aborts its process groups a second later:

- NCCL's and staged's collectives end. Their results are not those of all ranks, and a host may have queued an
  optimizer's step on them; `FailsTogether.confirm` looks before one.
- gloo has no abort. A scheduler that waits for a collective on the host looks up four times a second, and throws. A
  collective outside of a scheduler ends when the failed rank's process does, which closes its connections.

Every rank raises FailedRankError with that first failure, in what it runs then and in every later call: ranks have
started different collectives, so the groups cannot be used again. The launcher restarts the run from a checkpoint.

`FailTogether` is the context of work that all ranks do together: passes of a schedule, stages, steps of a trainer. A
backward pass is the caller's; `watch_backward` notices where it ends early. Not noticed: exceptions between passes,
such as an optimizer's; the end of their process closes its connections.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from oases.core.execution.group import HoldsGroup, ProcessGroup, scheduler_of
from oases.errors import UsageError, author_line, is_out_of_memory
from oases.extension import OverlapScheduler

_INTERVAL_SECONDS = 0.5
_NO_PASS = -1
"""Number of torch outside of backward passes."""


@dataclass(frozen=True)
class Failure:
    """Rank, op and line, first line of the cause, remedy, and the line of the model's author that was run."""

    rank: int
    where: str
    cause: str
    remedy: str = ""
    out_of_memory: bool = False
    author: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, where: str, remedy: str = "") -> Failure:
        """Describe an exception. remedy: of an op that ran out of memory."""
        lines = str(error).strip().splitlines() or [""]
        full = is_out_of_memory(error)
        ended = " (another rank has ended; its own output says why)" * (" by peer" in lines[0])
        return cls(rank, where, f"{type(error).__name__}: {lines[0]}{ended}", remedy * full, full, author_line(error))

    def __str__(self) -> str:
        what = "ran out of memory" if self.out_of_memory else "failed"
        return (
            f"{self.author and f'{self.author}: '}rank {self.rank} {what} at {self.where}: {self.cause}{self.remedy}"
        )


class FailedRankError(RuntimeError):
    """An op failed on one rank; raised on every rank of the run.

    On the failing rank `__cause__` is the op's exception. failure: its description.
    """

    failure: Failure


class FailedRankMemoryError(FailedRankError, torch.OutOfMemoryError):
    """FailedRankError for an out-of-memory error; `except torch.OutOfMemoryError` catches it on every rank."""


def error_of(failure: Failure, *, alone: bool = False) -> FailedRankError:
    """Error that every rank raises. alone: this rank has no others."""
    others = ". All ranks raise this, now and in later calls; restart the run from its newest checkpoint"
    error = (FailedRankMemoryError if failure.out_of_memory else FailedRankError)(f"{failure}{others * (not alone)}")
    error.failure = failure
    return error


class FailureMonitor:
    """Monitor of this process, one for each default group; its thread follows this module's docstring."""

    def __init__(self, world: ProcessGroup) -> None:
        self.world = ref(world)  # a reference would keep it from being destroyed
        self.rank = world.rank()
        self.failure: Failure | None = None
        self.watched = _NO_PASS
        """Number of the backward pass that is watched."""
        self.process = os.getpid()
        store: Any = _get_process_group_store(world)
        innermost = store
        while isinstance(innermost, dist.PrefixStore):
            innermost = innermost.underlying_store
        # A HashStore belongs to one process: the other ranks are simulated, as with torch's fake backend.
        self._alone = isinstance(innermost, dist.HashStore) or dist.get_backend(world) == "fake"
        # A clone, because a store client is locked while another thread uses it. torchrun's store outlives restarts.
        prefix = f"oases/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(prefix, dist.HashStore() if self._alone else store.clone())
        self._calls: dict[str, tuple[Any, CallAgreement]] = {}
        self._incarnations: Counter[str] = Counter()
        OverlapScheduler.go_on()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="oases-failure-monitor", daemon=True)
        self._thread.start()
        finalize(world, self.stop)

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def tell(self, failure: Failure) -> Failure:
        """Tell every rank of this rank's failure; return the run's first one."""
        self.watched = _NO_PASS
        with suppress(RuntimeError, OSError):  # the store is gone, with a rank or launcher, of which all others hear
            failure = Failure(**json.loads(self._store.compare_set("failure", "", json.dumps(asdict(failure)))))
        self._halt(failure)
        return failure

    def check(self) -> None:
        """Raise the run's failure, if there is one."""
        if self.failure is not None:
            raise error_of(self.failure)

    def calls_of(self, group: ProcessGroup) -> CallAgreement:
        """Calls of a group, whose ranks use it for the first time together."""
        name = group.group_name
        known = self._calls.get(name)
        if known is None or known[0]() is not group:
            scheduler_of(group).renew()
            self._incarnations[name] += 1  # the name of a destroyed group may be reused
            ranks = [group.rank()] if self._alone else range(group.size())
            prefix = f"calls/{name}/{self._incarnations[name]}"
            known = self._calls[name] = ref(group), CallAgreement(self._store, prefix, group.rank(), ranks)
        return known[1]

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(_INTERVAL_SECONDS):
                for name, (group, calls) in list(self._calls.items()):
                    if group() is None:
                        self._calls.pop(name, None)
                    else:
                        calls.answer()
                if self.failure is None and self._store.check(["failure"]):
                    self._halt(Failure(**json.loads(self._store.get("failure"))))
                if self.failure is not None:
                    self._abort()
                    return
        except (RuntimeError, OSError):
            return  # the store is gone, with a rank or launcher that held it

    def _halt(self, failure: Failure) -> None:
        """Have every later call raise, and what the host waits for in a scheduler."""
        self.failure = failure
        OverlapScheduler.halt(str(failure), failure.out_of_memory)

    def _abort(self) -> None:
        """End what else this rank waits for. Later than on all ranks the schedulers are halted, which say why."""
        self._stopped.wait(2 * _INTERVAL_SECONDS)
        for group in list(dist.distributed_c10d._world.pg_map):
            try:
                group.abort()
            except RuntimeError as error:
                print(f"oases: rank {self.rank}: a process group cannot be aborted: {error}", file=sys.stderr)


_monitor: FailureMonitor | None = None


def monitor_of(group: ProcessGroup | None) -> FailureMonitor | None:
    """This process's monitor, started at its first use; None for a group of one."""
    global _monitor
    if group is None or group.size() == 1:
        return None
    world = dist.group.WORLD or group
    if _monitor is None or _monitor.world() is not world:
        if _monitor is not None:
            _monitor.stop()
        _monitor = FailureMonitor(world)
    return _monitor


def has_failed() -> bool:
    """Whether a rank of this run has failed, so that it must be restarted."""
    return _monitor is not None and _monitor.failure is not None


def check(group: ProcessGroup | None) -> None:
    """Raise the run's failure, if there is one; a group of one has none."""
    monitor = monitor_of(group)
    if monitor is not None:
        monitor.check()


def begin_call(
    group: ProcessGroup | None, caller: str, form: Form, tensors: Sequence[Tensor] | None = None, about: Form = ()
) -> None:
    """Begin a call whose collectives all ranks of a group start.

    form: what is to be equal in each call of this caller. tensors: of the input, where the ranks compare samples of
    them. about: more to compare, once for each value. UsageError, on all ranks, where forms or samples differ;
    FailedRankError where a rank is in its call already, or has failed before. RuntimeError in a fork of the process
    that created the group.
    """
    monitor = monitor_of(group)
    if group is None or monitor is None:
        return
    if os.getpid() != monitor.process:
        raise RuntimeError(
            f"{caller} was called in a fork of the process that created its process group, whose connections and "
            "threads a fork does not have; start processes by spawn, or create group and model after the fork"
        )
    monitor.check()
    found, stuck = monitor.calls_of(group).agree((caller, about), form, tensors, monitor.check)
    if found and not stuck:
        raise CallsDifferError(f"{caller}: {found}")
    if found:
        raise error_of(monitor.tell(Failure(monitor.rank, caller, found)))


def refuse_capture(x: Tensor) -> None:
    """Raise RuntimeError during CUDA graph capture: the host starts and times collectives in every step."""
    if x.device.type in ("cpu", "meta"):
        return
    capturing = getattr(torch.get_device_module(x.device), "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise RuntimeError(
            "overlapped layers cannot be captured into a CUDA graph: the host starts and times their collectives "
            "in every step; leave them out of the capture"
        )


def refuse_recomputation(name: str) -> None:
    """Raise RuntimeError in a recomputation of a stack, with whose number its random numbers would change."""
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{name} was called in a backward pass, as by torch.utils.checkpoint around it; leave the checkpoint out "
            'and give the stack recompute="full", whose recomputation overlaps, too'
        )


class CallsDifferError(UsageError):
    """Calls of a group's ranks that differ. All of them raise it."""


class FailTogether:
    """Context of work that all ranks of a group do together: an exception inside raises an error on every rank.

    monitor: None for this process alone, where only out-of-memory errors get their place. where: the work, for
    the message, or a function that names it then. remedy: for a lack of memory. unanimous: exception types that all
    ranks raise by themselves. keeps_type: whether an exception keeps its type on the rank that raises it, as
    UsageErrors and interrupts do anyway. forget: releases the work's tensors.
    """

    def __init__(
        self, monitor: FailureMonitor | None, where: str | Callable[[], str], *, remedy: str = "",
        unanimous: tuple[type[BaseException], ...] = (), keeps_type: bool = False,
        forget: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._monitor, self._where, self._remedy = monitor, where, remedy
        self._unanimous, self._keeps_type, self._forget = unanimous, keeps_type, forget

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return None
        monitor = self._monitor
        unwatch_backward(monitor)  # all are told here, or need not be
        if isinstance(error, FailedRankError):
            return None
        forget = self._forget or (lambda: None)
        if isinstance(error, self._unanimous):
            return forget()
        where = self._where if isinstance(self._where, str) else self._where()
        mine = Failure.of(error, 0 if monitor is None else monitor.rank, where, self._remedy)
        if monitor is None and not mine.out_of_memory:
            if mine.author and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"raised at {mine.author}, run at {where}")
            return None  # no other rank to tell: keep the error
        forget()
        if mine.out_of_memory:
            traceback.clear_frames(trace)  # frames hold tensors, too
        first = mine if monitor is None else monitor.failure or monitor.tell(mine)
        if not isinstance(error, Exception):
            return None  # an interrupt or exit keeps its type on its rank
        if first.rank == mine.rank and (self._keeps_type or isinstance(error, UsageError) or first != mine):
            return None
        if isinstance(error, CallsDifferError):
            return None  # raised by every rank of its group; those of other groups are told
        raise error_of(first, alone=monitor is None) from error


class FailsTogether(HoldsGroup):
    """Mixin of a module whose calls fail on all ranks."""

    def confirm(self) -> None:
        """Wait for the device's queued work; raise FailedRankError if another rank has failed.

        For a custom training loop, before `optimizer.step()`: on an accelerator `backward()` returns before its
        collectives have ended, and they are not complete where a rank fails meanwhile. On the CPU nothing is waited
        for.
        """
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        check(self.process_group)


def watch_backward(monitor: FailureMonitor | None, label: str) -> None:
    """In a backward pass: if it ends by an exception that nobody tells, such as a hook's, tell all ranks.

    torch calls what is queued for the end of a pass, or drops it where an exception cuts the pass short.
    """
    task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
    # A pass that is recorded for second derivatives is refused, by all ranks.
    if monitor is not None and monitor.watched != task and not torch.is_grad_enabled():
        monitor.watched = task
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(_BackwardPass(monitor, task, f"the backward pass around {label}").end)


def unwatch_backward(monitor: FailureMonitor | None) -> None:
    """Stop reporting exceptions to peers: they raise it themselves, or know of it."""
    if monitor is not None:
        monitor.watched = _NO_PASS


class _BackwardPass:
    """A backward pass of the caller. torch calls `end`, or drops it where the pass was cut short."""

    def __init__(self, monitor: FailureMonitor, task: int, where: str) -> None:
        self._monitor, self._task, self._where = monitor, task, where

    def end(self) -> None:
        """Note that it is complete."""
        self._monitor.watched = _NO_PASS

    def __del__(self) -> None:
        monitor = self._monitor
        if monitor.watched == self._task and monitor.failure is None:
            cause = f"an exception in a hook or an autograd function; see the output of rank {monitor.rank}"
            monitor.tell(Failure(monitor.rank, self._where, cause))


# --- agreement ---

Form = tuple[Any, ...]
"""Hashable description of a call: alternating names and values, for messages."""
Sample = str | list[list[float]]
"""Hash of a tensor's integers, or sums over its segments and how much each may differ."""
Samples = list[Sample]

_SEGMENTS = 64
"""Segments of a tensor, both of neighbouring numbers and of every 64th."""
_ABSENT = "not given"
_PATIENT_SECONDS = 0.02
"""Pause between looks at the store, at most."""
_TOLERANCE = 0.05
"""Largest difference of a sum, relative to the spread of its segment, that ranks may have from rounding."""
_LARGE = 1e12
_ROUNDING = 2.0**-10
"""The same, relative to the segment's size: numbers of 32 bits may come from matmuls of fewer."""


class _Call(NamedTuple):
    """Call that the main thread runs. asks: whether it writes its form to the store itself."""

    number: int
    form: Form
    asks: bool


class CallAgreement:
    """Calls of one group on this rank, counted, and their forms. Collective, except for calls of unchanged forms.

    store: of the group, which other threads may use. ranks: of the group that exist.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._others = [each for each in ranks if each != rank]
        self._known: dict[Hashable, Form] = {}
        self._call = _Call(0, (), False)
        self._answered = 0
        self._lock = threading.Lock()

    def agree(
        self, caller: Hashable, form: Form, tensors: Sequence[Tensor] | None, check: Callable[[], None]
    ) -> tuple[str, bool]:
        """Begin a call; return how the ranks differ, "" for not, and whether one is in its collectives already.

        caller: its key, equal in each of its calls whose forms are to be equal. check: raises, while this rank waits
        for others, a failure of one of them. DistBackendError for a rank that does not come within the store's
        timeout.
        """
        if not self._others:
            return "", False
        number = self._call.number + 1
        asks = tensors is not None or self._known.get(caller) != form
        with self._lock:
            self._call = _Call(number, form, asks)
        if not asks:
            return "", False
        self._known[caller] = form
        mine = self._text(self._call, None if tensors is None else samples_of(tensors))
        self._store.set(self._key(number, self._rank), mine)
        self._store.set(f"{self._prefix}/asked", str(number))
        said = {self._rank: json.loads(mine)} | self._wait_for_others(number, check)
        found = _difference(said)
        if found:
            del self._known[caller]
        return found, any(each.get("stuck") for each in said.values())

    def answer(self) -> None:
        """Tell ranks that ask about the current call its form. Called by the monitor's thread, now and then."""
        key = f"{self._prefix}/asked"
        if not self._others or not self._store.check([key]):
            return
        number = int(self._store.get(key))
        with self._lock:
            call = self._call
            if call.number >= number and not call.asks and self._answered != number:
                self._answered = number
                self._store.set(self._key(number, self._rank), self._text(call, None))

    def _key(self, number: int, rank: int) -> str:
        """Key of what a rank says of a call. Two in turns, because after a disagreement, which has no collectives, a
        rank may be in its next call before another has read this one's.
        """
        return f"{self._prefix}/{rank}/{number % 2}"

    @staticmethod
    def _text(call: _Call, samples: Samples | None) -> str:
        form = [str(part) for part in call.form]
        return json.dumps({"number": call.number, "form": form, "stuck": not call.asks, "samples": samples})

    def _wait_for_others(self, number: int, check: Callable[[], None]) -> dict[int, dict[str, Any]]:
        """Collect the answers of the others, by rank; {} for one that has gone on from it, and so agreed."""
        found: dict[int, dict[str, Any]] = {}
        store: Any = self._store
        end = time.monotonic() + store.timeout.total_seconds()
        pause = 1e-4
        while True:
            for rank in self._others:
                key = self._key(number, rank)
                if rank not in found and self._store.check([key]):
                    said = json.loads(self._store.get(key))
                    if said["number"] >= number:
                        found[rank] = said if said["number"] == number or said["stuck"] else {}
            if len(found) == len(self._others):
                return found
            check()
            if time.monotonic() > end:
                gone = ", ".join(str(rank) for rank in self._others if rank not in found)
                raise dist.DistBackendError(
                    f"rank {self._rank} waited for rank {gone} to make the same call; see why it does not come to "
                    f"it, or give init_process_group a longer timeout ({self._call.form}: on all ranks)"
                )
            time.sleep(pause)
            pause = min(_PATIENT_SECONDS, 2 * pause)


def _difference(said: Mapping[int, dict[str, Any]]) -> str:
    """First difference from the lowest rank, equal on all ranks that said something; "" for none."""
    first, *others = sorted(rank for rank in said if said[rank])
    mine = said[first]
    for rank in others:
        theirs = said[rank]
        ours, its = (dict(zip(each["form"][::2], each["form"][1::2], strict=True)) for each in (mine, theirs))
        for name in ours | its:
            value, other = ours.get(name, _ABSENT), its.get(name, _ABSENT)
            if other != value:
                return (
                    f"the {name} differs between ranks of one group: {value} on rank {first}, "
                    f"{other} on rank {rank}; make the same calls on all of them"
                )
        if mine["samples"] and theirs["samples"] and not alike(mine["samples"], theirs["samples"]):
            return (
                f"ranks {first} and {rank} were given different inputs, of which each computes a part of one result; "
                "give all ranks of a tensor-parallel group the same batch, and vary batches over data-parallel "
                "replicas alone"
            )
    return ""


def samples_of(tensors: Iterable[Tensor]) -> Samples:
    """Digest of each tensor, for ranks to compare: a hash of integers, weighted sums of other numbers.

    Another number changes two sums: that of its neighbours, and that of every 64th number, in most tensors of one
    channel. A large channel or outlier therefore hides its own segments alone.
    """
    return [_sample(tensor.detach()) for tensor in tensors if not tensor.is_meta]


@torch.no_grad()
def _sample(tensor: Tensor) -> Sample:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    if not flat.is_floating_point():
        return hashlib.blake2b(
            flat.cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16
        ).hexdigest()
    rounding = max(_ROUNDING, torch.finfo(flat.dtype).eps)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    flat = torch.nan_to_num(flat, 0.0, _LARGE, -_LARGE).clamp(-_LARGE, _LARGE)  # of masks, whose squares overflow
    segments = min(_SEGMENTS, len(flat) // 4)
    length = len(flat) // segments if segments else 0
    head, tail = flat[: segments * length], flat[segments * length :]
    views = [head.view(segments, length), head.view(length, segments).t(), tail.view(1, -1)]
    found = [_sums(rows, rounding) for rows in views if rows.numel()]
    return torch.cat(found, 1).double().tolist() if found else [[], []]


def _sums(rows: Tensor, rounding: float) -> Tensor:
    """[segments, numbers] -> [2, segments]: a weighted sum of each segment, and how much it may differ."""
    # Other weights for each number, so that exchanged numbers change the sum.
    count = rows.shape[1]
    weights = torch.arange(1, count + 1, device=rows.device, dtype=torch.float32).square().sin().to(rows.dtype)
    norm = torch.linalg.vector_norm(rows, dim=1)
    spread = (norm.square() - count * rows.mean(1).square()).clamp_min(0).sqrt()
    return torch.stack((rows @ weights, _TOLERANCE * spread + rounding * norm))


def is_sampled(call: int) -> bool:
    """Whether the ranks compare samples of their inputs at this call, counted from 1: at the powers of two."""
    return call & (call - 1) == 0


def alike(one: Samples, other: Samples) -> bool:
    """Whether samples of the same tensors are equal up to rounding."""
    return len(one) == len(other) and all(map(_alike, one, other))


def _alike(mine: Sample, theirs: Sample) -> bool:
    if isinstance(mine, str) or isinstance(theirs, str) or len(mine[0]) != len(theirs[0]):
        return mine == theirs
    return not any(abs(a - b) > max(allowed, its) for a, allowed, b, its in zip(*mine, *theirs, strict=True))
