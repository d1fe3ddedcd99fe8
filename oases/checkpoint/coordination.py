"""Collective decisions about checkpoints: every rank returns or raises alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from oases.core.execution.failure import check
from oases.core.execution.group import ProcessGroup, all_gather_objects
from oases.errors import UsageError

T = TypeVar("T")


class SaveError(UsageError):
    """Failure to write a checkpoint, raised on every rank; earlier checkpoints are unchanged."""


def run_on_all_ranks(action: Callable[[], T], what: str, group: ProcessGroup | None) -> list[T]:
    """Run a part of saving on every rank; returns every rank's result.

    Raises SaveError on every rank, with its message, if it failed on one: the others wait for all. FailedRankError
    after a failure of the run.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # slow to import

    check(group)
    result: Any = None
    fault = ""
    failed: BaseException | None = None
    try:
        result = action()
    except (OSError, CheckpointException) as error:  # the second holds the errors of all ranks
        causes = [error] if isinstance(error, OSError) else [cause for cause, _ in error.failures.values()]
        failed, fault = error, f"{'; '.join(map(str, causes))}; free disk space, or save elsewhere"
    except Exception as error:
        failed, fault = error, f"{error}" if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    everyone = all_gather_objects((result, fault), group)
    for rank, (_, said) in enumerate(everyone):
        if said:
            raise SaveError(f"{what} could not be written: rank {rank}: {said}") from failed
    return [found for found, _ in everyone]
