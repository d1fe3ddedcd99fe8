"""Propagation of exceptions around a schedule's ops: one on this rank is raised on every rank of its groups.

A rank that fails outside of a stack (in a hook of a parameter, a head's forward pass, a layer of its own) leaves the
others in a collective that it never starts. `fail_together` and `told` are contexts of code that is ours.
`watch_backward` is for a backward pass, which is the caller's: torch drops what is queued for its end where an
exception cuts it short. `watch_passes` does both for a module that the caller runs.

Not propagated: exceptions between the passes, such as an optimizer's, and interrupts in a forward pass outside of
stacks and layers, of which torch tells no hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.core.execution.failure import (
    NO_PASS,
    FailedRankError,
    Failure,
    FailureMonitor,
    error_of,
    known_monitor,
    lost_a_rank,
)
from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError


class EarlyEnd(Exception):  # noqa: N818  (no error)
    """Control flow that leaves a forward pass early, at the same point on all ranks of a group; nobody is told."""


Standing = list[tuple[FailureMonitor, int]]
"""Monitors of groups, and how many failures each has had."""


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
    except BaseException as error:
        if monitor is not None:
            monitor.watched = NO_PASS  # they are told here, or need not be
        if monitor is None or isinstance(error, (FailedRankError, *unanimous)):
            raise
        if monitor.scheduler.failures != before:  # the scheduler stopped this rank
            raise monitor.error() from error
        if lost_a_rank(error):
            raise
        failure = Failure.of(error, monitor.rank, where)
        broken = monitor.fail(failure)
        if isinstance(error, UsageError) or not isinstance(error, Exception):
            raise
        raise error_of(failure, broken, monitor.size) from error


@contextmanager
def told(groups: Iterable[ProcessGroup | None], where: str) -> Iterator[None]:
    """Raise an exception of the body, which keeps its type here, on every rank of these groups, too."""
    before = _standing(groups)
    try:
        yield
    except BaseException as error:
        _tell(before, where, error)
        raise


def watch_backward(monitor: FailureMonitor | None, where: str) -> None:
    """In a backward pass: if it ends by an exception that nobody tells, such as a hook's, tell the group's ranks."""
    task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
    # A pass that is recorded for second derivatives is refused, by all ranks.
    if monitor is not None and monitor.watched != task and not torch.is_grad_enabled():
        monitor.watched = task
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(_BackwardPass(monitor, task, where).end)


def watch_passes(module: nn.Module, groups: Callable[[], Iterable[ProcessGroup | None]]) -> None:
    """Tell all ranks of a module's groups where its forward pass, or the backward pass from its results, fails.

    groups: of this rank, at each call; a method of an object that is copied with the module.
    """
    passes = _Passes(type(module).__name__, groups)
    module.register_forward_pre_hook(passes.begin)
    module.register_forward_hook(passes.end, always_call=True)


class _BackwardPass:
    """A backward pass of the caller. torch calls `end`, or drops it where the pass was cut short."""

    def __init__(self, monitor: FailureMonitor, task: int, where: str) -> None:
        self._monitor, self._task, self._where = monitor, task, where
        self._failures = monitor.scheduler.failures

    def end(self) -> None:
        """Note that it is complete."""
        self._monitor.watched = NO_PASS

    def __del__(self) -> None:
        monitor = self._monitor
        if monitor.watched != self._task or monitor.scheduler.failures != self._failures or monitor.link_lost:
            return
        monitor.watched = NO_PASS
        cause = f"an exception in a hook or an autograd function; see the output of rank {monitor.rank}"
        monitor.fail(Failure(monitor.rank, self._where, cause, "", False))


class _Passes:
    """Hooks of one module. where: its name."""

    def __init__(self, where: str, groups: Callable[[], Iterable[ProcessGroup | None]]) -> None:
        self._where, self._groups = where, groups
        self._open: list[tuple[BaseException | None, Standing]] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        """Note what is before a forward pass."""
        self._open.append((sys.exc_info()[1], _standing(self._groups())))

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        """After a forward pass: tell its exception, or watch what autograd makes of its results."""
        if not self._open:  # refused before it began, by all ranks
            return
        outer, before = self._open.pop()
        error = sys.exc_info()[1]
        if isinstance(error, EarlyEnd):
            return
        if error is not None and error is not outer:
            _tell(before, self._where, error)
        elif torch.is_grad_enabled():
            for tensor in differentiable(result):
                tensor.register_hook(self._arrived)

    def _arrived(self, grad: Tensor) -> None:
        for monitor, _ in _standing(self._groups()):
            watch_backward(monitor, f"the backward pass of {self._where}")


def differentiable(result: Any) -> list[Tensor]:
    """Tensors in a module's result that a backward pass may come from."""
    # Of vocabulary-parallel logits, from which the loss is computed, this rank's part.
    found = (getattr(leaf, "part", leaf) for leaf in pytree.tree_leaves(result))
    return [each for each in found if isinstance(each, Tensor) and each.requires_grad]


def watch_group(group: ProcessGroup | None, label: str) -> None:
    """`watch_backward` of an op, by its name, for a group that has a monitor."""
    watch_backward(known_monitor(group), f"the backward pass around {label}")


def _standing(groups: Iterable[ProcessGroup | None]) -> Standing:
    monitors = [known_monitor(group) for group in groups]
    return [(monitor, monitor.scheduler.failures) for monitor in monitors if monitor is not None]


def _tell(before: Standing, where: str, error: BaseException) -> None:
    """Tell the groups of an exception, except those that know of it, and unless a rank is gone."""
    for monitor, failures in before:
        monitor.watched = NO_PASS
        if monitor.scheduler.failures == failures and not lost_a_rank(error):
            monitor.fail(Failure.of(error, monitor.rank, where))
