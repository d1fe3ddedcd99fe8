"""Failures in work that no schedule runs: a module's passes, and work without collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.core.execution.call import refuse_second_derivatives
from oases.core.execution.failure import Failure, begin_call, check, monitor_of, watch_backward
from oases.core.execution.group import ProcessGroup, all_gather_objects
from oases.errors import UsageError


@contextmanager
def raise_together(process_group: ProcessGroup | None) -> Iterator[None]:
    """Raise an exception of the body on every rank at the end of the block. Collective.

    All ranks then go on. The body itself must contain no collective. FailedRankError after a failure of the run;
    an error that names a rank which does not come, or makes another call.
    """
    check(process_group)
    caller = sys._getframe(2).f_code.co_name  # of the `with`
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    told = None if mine is None else (isinstance(mine, UsageError), f"{type(mine).__name__}: {mine}")
    begin_call(process_group, caller, ("call", caller), ())
    said = all_gather_objects(told, process_group)
    if mine is not None:
        raise mine
    for rank, what in enumerate(said):
        if what is not None:
            is_usage_error, text = what
            raise (UsageError if is_usage_error else RuntimeError)(f"rank {rank}: {text}")


class EarlyEnd(Exception):  # noqa: N818  (no error)
    """Leaves a forward pass early on all ranks of a group, at the same point; not reported as a failure."""


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
        refuse_second_derivatives(self._where)
        watch_backward(monitor_of(self._group()), self._where)


def differentiable(result: Any) -> list[Tensor]:
    """Tensors in a module's result that a backward pass may come from."""
    # Of vocabulary-parallel logits, from which the loss is computed, this rank's part.
    found = (getattr(leaf, "part", leaf) for leaf in pytree.tree_leaves(result))
    return [each for each in found if isinstance(each, Tensor) and each.requires_grad]


def lost_a_rank(error: BaseException) -> bool:
    """Whether a link or a rank is gone, rather than an op has failed."""
    # Collectives outside the scheduler (barriers, object exchange) fail with gloo's bare RuntimeError.
    # A lost connection to the store is a DistNetworkError.
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        type(error) is RuntimeError and "gloo" in str(error).lower()
    )
