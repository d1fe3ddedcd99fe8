"""Torch's elastic agents, which start and monitor ranks: one in this process, or one per node of the testbed.

With several nodes this process starts an agent in each, waits for their reports, and ends all when one fails. Agents
and ranks die with the process that started them, however that ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore

from oases.launch import fork_server
from oases.testbed import Nodes

_LOCAL = "127.0.0.1"
_LOOPBACK = "oases-loopback"
"""Name of the rendezvous of a single agent."""
_PORT = 29400  # of the store on node 0, which has a network of its own
_EXIT_SECONDS = 20.0
_SAVING_SECONDS = 35.0  # ranks may save at SIGTERM; an agent waits 30 s for its own


class RankFailedError(Exception):
    """A rank or an agent ended early. who: its name; exit_code: its exit code, -n for signal n."""

    def __init__(self, who: str, exit_code: int) -> None:
        super().__init__(f"{who} ended with exit code {exit_code}")
        self.who = who
        self.exit_code = exit_code


def launch(entrypoint: Callable[..., Any], arguments: tuple[Any, ...], size: int, nodes: Nodes | None) -> Any:
    """Call `entrypoint(*arguments)` on `size` new ranks; return rank 0's result.

    RankFailedError for the rank that failed first; KeyboardInterrupt if this process received SIGINT or SIGTERM;
    UsageError if the ranks cannot be divided evenly among the nodes.
    """
    if nodes is not None:
        return _launch_on(nodes, entrypoint, arguments, size)
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(_LOOPBACK, _loopback_rendezvous)
    method = fork_server.start(_modules_of(entrypoint, *arguments))
    return _run_agent(
        entrypoint, arguments, method, min_nodes=1, max_nodes=1, nproc_per_node=size, rdzv_backend=_LOOPBACK,
        local_addr=_LOCAL,
    )[0]  # fmt: skip


def loopback_store() -> TCPStore:
    """Start a store that only this machine reaches; torch's own listens on every interface."""
    listener = socket.create_server((_LOCAL, 0))
    port = listener.getsockname()[1]
    return TCPStore(_LOCAL, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _loopback_rendezvous(parameters: Any) -> Any:
    """Rendezvous of a single agent over `loopback_store`, which its ranks share."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class LoopbackRendezvous(RendezvousHandler):
        def __init__(self) -> None:
            self._store = loopback_store()
            self._closed = False

        use_agent_store = True

        def get_backend(self) -> str:
            return _LOOPBACK

        def get_run_id(self) -> str:
            return str(parameters.run_id)

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOCAL, self._store.port))

        def num_nodes_waiting(self) -> int:
            return 0

        def is_closed(self) -> bool:
            return self._closed

        def set_closed(self) -> None:
            self._closed = True

        def shutdown(self) -> bool:
            self._closed = True
            return True

    return LoopbackRendezvous()


def _modules_of(*values: Any) -> list[str]:
    """The modules of those values that are functions."""
    return [value.__module__ for value in values if callable(value)]


def _run_agent(
    entrypoint: Callable[..., Any], arguments: tuple[Any, ...], start_method: str, **options: Any
) -> dict[int, Any]:
    """Run an agent in this process; returns the results of its ranks."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks print their own errors; torchrun's report would bury them.
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        run_id="oases", max_restarts=0, start_method=start_method, monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else a temporary folder stays
        **options,
    )  # fmt: skip
    try:
        return elastic_launch(config, fork_server.as_started_by)(fork_server.Launcher(), entrypoint, *arguments)
    except SignalException as error:
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankFailedError(f"rank {rank}", failure.exitcode) from error


# --- several agents ---


@dataclass(frozen=True)
class _Report:
    """Final message of an agent: rank 0's result if it ran rank 0, or (who, exit code) of a failure."""

    result: Any = None
    failed: tuple[str, int] | None = None


@dataclass
class _Agent:
    """Agent of one node: its process and our end of its pipe."""

    node: int
    process: BaseProcess
    connection: Connection
    reported: bool = False

    def receive(self) -> Any:
        """Receive its next message; RankFailedError if it ended without one."""
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            raise RankFailedError(f"the agent of node {self.node}", self.process.exitcode or 0) from None


def _launch_on(nodes: Nodes, entrypoint: Callable[..., Any], arguments: tuple[Any, ...], size: int) -> Any:
    nodes.require_inside()
    per_node = nodes.ranks_per_node(size)
    agents: list[_Agent] = []
    last = signal.SIGKILL  # before ranks exist there is nothing to end in order
    with _sigterm_interrupts():
        try:
            _start(agents, nodes, entrypoint, arguments, per_node)
            for agent in agents:
                agent.receive()
            nodes.join([agent.process.pid or 0 for agent in agents])
            for agent in agents:
                agent.connection.send("joined")
            last = signal.SIGTERM
            return _result(agents)
        except KeyboardInterrupt as error:
            if last == signal.SIGTERM and not isinstance(error, _TerminatedError):
                last = signal.SIGINT  # ranks exit at once; at SIGTERM they may have to save first
            raise
        finally:
            _end(agents, last)


class _TerminatedError(KeyboardInterrupt):
    """Interrupt caused by SIGTERM."""


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, as elastic agents do."""

    def interrupt(number: int, frame: Any) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(
    agents: list[_Agent], nodes: Nodes, entrypoint: Callable[..., Any], arguments: tuple[Any, ...], per_node: int
) -> None:
    context = fork_server.context(_modules_of(entrypoint, *arguments))
    with fork_server.signals_held():
        for node in range(nodes.count):
            ours, theirs = context.Pipe()
            work = (fork_server.Launcher(), _serve, theirs, node, nodes, entrypoint, arguments, per_node)
            process = context.Process(target=fork_server.as_started_by, args=work)
            process.start()
            theirs.close()  # so that its death is the end of the pipe
            agents.append(_Agent(node, process, ours))


def _result(agents: list[_Agent]) -> Any:
    """Rank 0's result once every agent is done; RankFailedError as soon as one is not."""
    result = None
    running: dict[Any, _Agent] = {agent.connection: agent for agent in agents}
    while running:
        for connection in wait(list(running)):
            agent = running.pop(connection)
            report: _Report = agent.receive()
            agent.reported = True
            if report.failed is not None:
                raise RankFailedError(*report.failed)
            if agent.node == 0:
                result = report.result
    return result


def _end(agents: list[_Agent], last: signal.Signals) -> None:
    """Send the signal `last` to agents that still run; kill those that do not end in time."""
    running = [agent for agent in agents if not agent.reported and agent.process.exitcode is None]
    try:
        for agent in running:
            assert agent.process.pid is not None
            os.kill(agent.process.pid, last)
        open_ends: list[Any] = [agent.connection for agent in running]
        end = time.monotonic() + (_SAVING_SECONDS if last == signal.SIGTERM else _EXIT_SECONDS)
        while open_ends and time.monotonic() < end:
            for connection in wait(open_ends, end - time.monotonic()):
                open_ends.remove(connection)
    finally:
        for agent in agents:
            agent.connection.close()
        for agent in agents:
            agent.process.join(_EXIT_SECONDS if agent.reported else 3)
            if agent.process.is_alive():
                agent.process.kill()
                agent.process.join()


def _serve(
    connection: Connection,
    node: int,
    nodes: Nodes,
    entrypoint: Callable[..., Any],
    arguments: tuple[Any, ...],
    per_node: int,
) -> None:
    """Run the agent of one node; the target of its process."""
    os.setpgrp()  # Ctrl-C in a terminal reaches the launcher, which passes it on once
    for number in fork_server.HELD_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # until the agent has its own: no traceback
    fork_server.release_signals()
    fork_server.die_with_parent()
    nodes.enter()
    connection.send("entered")
    connection.recv()
    nodes.open(node)
    try:
        # Forked from this process, which the server has forked before it had a thread: the server is in no node.
        results = _run_agent(
            entrypoint, arguments, "fork", min_nodes=nodes.count, max_nodes=nodes.count, nproc_per_node=per_node,
            rdzv_backend="static", rdzv_endpoint=f"{nodes.address(0)}:{_PORT}", rdzv_configs={"rank": node},
            local_addr=nodes.address(node),
        )  # fmt: skip
        connection.send(_Report(results.get(0)))
    except (KeyboardInterrupt, RankFailedError) as error:
        for number in fork_server.HELD_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        failed = (error.who, error.exit_code) if isinstance(error, RankFailedError) else ("", 130)
        # The error's traceback holds the agent, and on node 0 with it the store, by which other nodes hear of the
        # failure: stay until the launcher has heard from all.
        with suppress(EOFError, OSError):
            connection.send(_Report(failed=failed))
            connection.recv()
