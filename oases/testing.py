"""Multi-process testing: a pool of ranks that run functions and return their results.

    with RankPool(2) as ranks:
        results = ranks.run(function, argument)     # one result per rank

Processes are started once and reused, because importing torch costs more than most tests. All pools of a process
fork their ranks from one server, which has already imported torch.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from oases.launch import fork_server
from oases.launch.agents import loopback_store


def _serve(rank: int, size: int, port: int, backend: str, connection: Connection) -> None:
    fork_server.release_signals()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    timeout = timedelta(seconds=120)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        task = connection.recv()
        if task is None:
            break
        function, args = task
        if function is _destroy_groups:
            _destroy_groups()
            continue
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        failure: Any = sys.modules.get("oases.core.execution.failure")
        connection.send((*answer, failure is not None and failure.has_failed()))
    dist.destroy_process_group()


def _destroy_groups() -> None:
    """Destroy all groups but the default one: each has threads that poll, and a pool makes hundreds of groups.

    Groups that are named after their ranks stay, because the next one of that name would read stale addresses.
    """
    if "torch.distributed.tensor" in sys.modules:  # which keeps placements on meshes of groups that are destroyed now
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if group is not dist.group.WORLD and name.isdigit():
            dist.destroy_process_group(group)


class RankPool:
    """Pool of `size` new processes with a default group.

    backend: of torch.distributed; "staged" takes a fraction of gloo's time for small tensors.
    Functions must be importable by name, arguments and results picklable. After a failed call, or one in which a rank
    of a run failed, which leave groups unusable, the next call starts new processes.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._failed = False
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._start()

    def _start(self) -> None:
        context, self._failed = fork_server.context(), False
        self._store = loopback_store()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=fork_server.as_started_by,
                args=(fork_server.Launcher(), _serve, rank, self.size, self._store.port, self.backend, theirs),
                daemon=True,
            )
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 300.0) -> list[Any]:
        """Call `function(*args)` on every rank; return the results in rank order.

        Raises RuntimeError with the tracebacks of the ranks that failed or for a rank that died, TimeoutError for one
        that hangs. Once a rank has failed, the others have ten seconds to say what they waited for.
        """
        if not self._connections:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        results, failures = self._collect(timeout_seconds)
        if failures or len(results) < self.size:
            self._kill()
            if failures:
                raise RuntimeError(failures)
            missing = min(set(range(self.size)) - set(results))
            raise TimeoutError(f"rank {missing} did not answer within {timeout_seconds} s")
        if self._failed:
            self._kill()
        for connection in self._connections:  # all ranks have left the call, and none waits for this one
            connection.send((_destroy_groups, ()))
        return [results[rank] for rank in range(self.size)]

    def _collect(self, timeout_seconds: float) -> tuple[dict[int, Any], str]:
        """Results that came in time, by rank, and what went wrong, or ""."""
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        results: dict[int, Any] = {}
        failures = ""
        end = time.monotonic() + timeout_seconds
        while waiting and (ready := wait(waiting, max(0.0, end - time.monotonic()))):
            for connection in [each for each in waiting if each in ready]:
                rank = waiting.pop(connection)
                try:
                    succeeded, results[rank], failed = connection.recv()
                    self._failed |= failed
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    failures += f"rank {rank} ended with exit code {self._processes[rank].exitcode}\n"
                    end = 0.0
                else:
                    if not succeeded:
                        failures += f"rank {rank} failed:\n{results[rank]}"
                        end = min(end, time.monotonic() + 10.0)
        return results, failures

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """Stop the processes."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                try:
                    connection.send(None)
                except BrokenPipeError:
                    continue
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._connections, self._processes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
