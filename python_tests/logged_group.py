"""Process group in one process that logs the order of events: starts of all-reduces, waits for them, matmuls.

The log shows overlap without a clock: an all-reduce is exposed if no matmul runs between its start and its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)


class Event(NamedTuple):
    """kind: "start", "wait" or "matmul". number: of the all-reduce; -1 for a matmul."""

    kind: str
    number: int


class LoggedGroup(dist.ProcessGroup):
    """Rank 0 of `size` ranks with the same tensors; a sum leaves its tensor as it is. log: since `logging` began."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.log: list[Event] = []
        self._started = 0

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors, options=None):
        number, self._started = self._started, self._started + 1
        self.log.append(Event("start", number))
        return _LoggedWork(self.log, number)

    def allgather(self, outputs, inputs, options=None):
        """For all_gather_object; not logged."""
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _LoggedWork([], 0)

    @contextmanager
    def logging(self) -> Iterator[list[Event]]:
        """Context with a new log, which receives the matmuls, too."""
        self.log.clear()
        self._started = 0
        with _LogsMatmuls(self.log):
            yield self.log

    def exposed(self) -> list[int]:
        """Numbers of the all-reduces of the log that no matmul hides. Each must be waited for once."""
        numbers = range(self._started)
        assert sorted(event.number for event in self.log if event.kind == "wait") == list(numbers)
        return [
            number
            for number in numbers
            if Event("matmul", -1)
            not in self.log[self.log.index(Event("start", number)) : self.log.index(Event("wait", number))]
        ]


class _LoggedWork(Work):
    def __init__(self, log: list[Event], number: int) -> None:
        super().__init__()
        self._log, self._number = log, number

    def wait(self, timeout=None):
        self._log.append(Event("wait", self._number))
        return True

    def is_completed(self):
        return True


class _LogsMatmuls(TorchDispatchMode):
    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in _MATMULS:
            self._log.append(Event("matmul", -1))
        return function(*args, **(kwargs or {}))


@contextmanager
def logged_group(size: int = 2) -> Iterator[LoggedGroup]:
    """Context with a LoggedGroup as the default group."""
    if "logged" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "logged", lambda store, rank, size, timeout: LoggedGroup(rank, size), devices=["cpu"]
        )
    dist.init_process_group("logged", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
