"""What the ranks of a run tell each other about a checkpoint, so that all of them do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_size

T = TypeVar("T")


class SaveError(UsageError):
    """A checkpoint could not be written; those written before are as they were. Every rank raises it."""


def all_gather_objects(mine: T, group: ProcessGroup | None) -> list[T]:
    """Every rank's object, in rank order."""
    everyone: list[Any] = [mine] * group_size(group)
    if group_size(group) > 1:
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def run_on_all_ranks(action: Callable[[], T], what: str, group: ProcessGroup | None) -> list[T]:
    """Do a part of saving on this rank; return every rank's result.

    Raises SaveError on every rank, with what the system said, if it failed on one.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # see checkpoint.py

    result: Any = None
    fault = ""
    try:
        result = action()
    except OSError as error:
        fault = str(error)
    except CheckpointException as error:  # holds what each rank raised
        fault = "; ".join(str(cause) for cause, _ in error.failures.values())
    everyone = all_gather_objects((result, fault), group)
    for rank, (_, said) in enumerate(everyone):
        if said:
            raise SaveError(f"{what} could not be written: rank {rank}: {said}; make room, or save elsewhere")
    return [found for found, _ in everyone]
