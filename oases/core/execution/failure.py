"""Failure rule: an exception on one rank raises an error on every rank, and no rank waits for ever in a collective.

The rank that fails writes its number, the op and the cause to the store of the default group, once; the first failure
of a run counts. A thread on every rank polls the store twice a second, which is the only cost of a step without
failures. When it finds a failure, or its own rank has one, it halts the schedulers of this process, and aborts its
process groups a second later:

- NCCL's and staged's collectives end. Their results are not those of all ranks, and a host may have queued an
  optimizer's step on them; `FailsTogether.confirm` looks before one.
- gloo has no abort. A scheduler that waits for a collective on the host looks up four times a second, and throws. A
  collective outside of a scheduler ends when the failed rank's process does, which closes its connections.

Every rank raises FailedRankError with that first failure, in what it runs then and in every later call: ranks have
started different collectives, so the groups cannot be used again. The launcher restarts the run from a checkpoint.

`FailTogether` is the context of work that all ranks do together: passes of a schedule, stages, steps of a trainer. A
backward pass and a module's forward pass are the caller's; `watch_backward` and `watch_passes` notice where they end
early. Not noticed: exceptions between them, such as an optimizer's, and interrupts in a forward pass outside of
stacks and layers, of which torch tells no hook; the end of their process closes its connections.
`raise_together` is for work without collectives, after which all ranks go on, or raise the same error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_process_group_store

from oases.core.execution.agreement import CallAgreement, Form, Samples
from oases.core.execution.group import HoldsGroup, ProcessGroup, all_gather_objects, scheduler_of
from oases.errors import UsageError
from oases.extension import OverlapScheduler

_INTERVAL_SECONDS = 0.5
_NO_PASS = -1
"""Number of torch outside of backward passes."""


@dataclass(frozen=True)
class Failure:
    """Rank, op and line, first line of the cause, remedy."""

    rank: int
    where: str
    cause: str
    remedy: str = ""
    out_of_memory: bool = False

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
        # A HashStore belongs to one process: the other ranks are simulated, as with torch's fake backend.
        self._alone = isinstance(_innermost(store), dist.HashStore) or dist.get_backend(world) == "fake"
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
    group: ProcessGroup | None, caller: str, form: Form, samples: Samples | None = None, about: Form = ()
) -> None:
    """Begin a call whose collectives all ranks of a group start; see `CallAgreement.begin`.

    UsageError, on all ranks, where their forms or samples differ; FailedRankError where a rank is in its call
    already, or has failed before. RuntimeError in a fork of the process that created the group.
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
    found = monitor.calls_of(group).begin((caller, about), form, samples, monitor.check)
    if found is None:
        return
    if not found.stuck:
        raise CallsDifferError(f"{caller}: {found.text}")
    raise error_of(monitor.tell(Failure(monitor.rank, caller, found.text)))


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


@contextmanager
def raise_together(process_group: ProcessGroup | None) -> Iterator[None]:
    """Raise an exception of the body on every rank at the end of the block. Collective.

    All ranks then go on. The body itself must contain no collective. FailedRankError after a failure of the run.
    """
    check(process_group)
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    told = None if mine is None else (isinstance(mine, UsageError), f"{type(mine).__name__}: {mine}")
    said = all_gather_objects(told, process_group)
    if mine is not None:
        raise mine
    for rank, what in enumerate(said):
        if what is not None:
            is_usage_error, text = what
            raise (UsageError if is_usage_error else RuntimeError)(f"rank {rank}: {text}")


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


# --- passes that the caller runs ---


class EarlyEnd(Exception):  # noqa: N818  (no error)
    """Leaves a forward pass early on all ranks of a group, at the same point; not reported as a failure."""


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


def watch_passes(module: nn.Module, group: Callable[[], ProcessGroup | None]) -> None:
    """Tell all ranks where a module's forward pass, or the backward pass from its results, fails.

    group: of this rank, at each call; a method of an object that is copied with the module.
    """
    passes = _Passes(type(module).__name__, group)
    module.register_forward_pre_hook(passes.begin)
    module.register_forward_hook(passes.end, always_call=True)


class _Passes:
    """Hooks of one module. where: its name."""

    def __init__(self, where: str, group: Callable[[], ProcessGroup | None]) -> None:
        self._where, self._group = where, group
        self._open: list[BaseException | None] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        """Note what is before a forward pass."""
        self._open.append(sys.exc_info()[1])

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        """After a forward pass: tell its exception, or watch what autograd makes of its results."""
        if not self._open:  # refused before it began, by all ranks
            return
        outer, error = self._open.pop(), sys.exc_info()[1]
        if isinstance(error, EarlyEnd):
            return
        if error is not None and error is not outer:
            monitor = monitor_of(self._group())
            if monitor is not None and monitor.failure is None:
                monitor.tell(Failure.of(error, monitor.rank, self._where))
        elif torch.is_grad_enabled():
            for tensor in differentiable(result):
                tensor.register_hook(self._arrived)

    def _arrived(self, grad: Tensor) -> None:
        watch_backward(monitor_of(self._group()), self._where)


def differentiable(result: Any) -> list[Tensor]:
    """Tensors in a module's result that a backward pass may come from."""
    # Of vocabulary-parallel logits, from which the loss is computed, this rank's part.
    found = (getattr(leaf, "part", leaf) for leaf in pytree.tree_leaves(result))
    return [each for each in found if isinstance(each, Tensor) and each.requires_grad]


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
