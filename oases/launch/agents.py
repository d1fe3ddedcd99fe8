"""Torch's elastic agents, which start and monitor ranks: one in this process, or one per node of the testbed.

Agents and ranks die with the process that started them, however that ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

from oases.launch import fork_server
from oases.testbed import Nodes

_LOCAL = "127.0.0.1"
_LOOPBACK = "oases-loopback"
"""Name of the rendezvous of a single agent."""
_PORT = 29400  # of the store on node 0, which has a network of its own
_SAVING_SECONDS = 35  # ranks may save at SIGTERM; an agent waits 30 s for its own
_MEETING_SECONDS = 300.0


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


def _silence_elastic() -> None:
    """Ranks print their own errors; torchrun's report would bury them."""
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _run_agent(
    entrypoint: Callable[..., Any], arguments: tuple[Any, ...], start_method: str, **options: Any
) -> dict[int, Any]:
    """Run an agent in this process; returns the results of its ranks."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_elastic()
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


def _launch_on(nodes: Nodes, entrypoint: Callable[..., Any], arguments: tuple[Any, ...], size: int) -> Any:
    """Start an agent per node, as a worker of torch's elastic processes, and join their nodes."""
    from torch.distributed.elastic.multiprocessing import start_processes
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException

    nodes.require_inside()
    per_node = nodes.ranks_per_node(size)
    context = fork_server.context(_modules_of(entrypoint, *arguments))
    meeting, failures = context.Barrier(nodes.count + 1), context.SimpleQueue()
    work = (meeting, failures, nodes, entrypoint, arguments, per_node)
    _silence_elastic()
    agents = None
    try:
        with fork_server.signals_held():
            agents = start_processes(
                "node", fork_server.as_started_by,
                {node: (fork_server.Launcher(), _serve, node, *work) for node in range(nodes.count)},
                {node: {} for node in range(nodes.count)}, DefaultLogsSpecs(log_dir=os.devnull),
                start_method=context.get_start_method(),
            )  # fmt: skip
        meeting.wait(_MEETING_SECONDS)  # all are in namespaces of their own
        nodes.join(list(agents.pids().values()))
        meeting.wait(_MEETING_SECONDS)
        done = agents.wait(period=0.1)
    except SignalException as error:
        if agents is not None:
            agents.close(error.sigval, _SAVING_SECONDS)
        raise KeyboardInterrupt from error
    except BaseException as error:
        if agents is not None:
            agents.close(signal.SIGKILL)
        if isinstance(error, threading.BrokenBarrierError):
            raise RankFailedError("the agent of a node", 1) from error
        raise
    assert done is not None, "it waits for ever"
    if not failures.empty():
        raise RankFailedError(*failures.get())
    for node, failure in done.failures.items():
        raise RankFailedError(f"the agent of node {node}", failure.exitcode)
    return done.return_values[0]


def _serve(
    node: int, meeting: Any, failures: Any, nodes: Nodes, entrypoint: Callable[..., Any],
    arguments: tuple[Any, ...], per_node: int,
) -> Any:  # fmt: skip
    """Run the agent of one node; return rank 0's result if it ran rank 0."""
    os.setpgrp()  # Ctrl-C in a terminal reaches the launcher, which passes it on once
    for number in fork_server.HELD_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # until the agent has its own: no traceback
    fork_server.release_signals()
    fork_server.die_with_parent()
    try:
        nodes.enter()
    except OSError:
        meeting.abort()
        raise
    meeting.wait(_MEETING_SECONDS)
    meeting.wait(_MEETING_SECONDS)
    nodes.open(node)
    try:
        # Forked from this process, which the server has forked before it had a thread: the server is in no node.
        results = _run_agent(
            entrypoint, arguments, "fork", min_nodes=nodes.count, max_nodes=nodes.count, nproc_per_node=per_node,
            rdzv_backend="static", rdzv_endpoint=f"{nodes.address(0)}:{_PORT}", rdzv_configs={"rank": node},
            local_addr=nodes.address(node),
        )  # fmt: skip
    except RankFailedError as error:
        failures.put((error.who, error.exit_code))
        os._exit(1)
    except KeyboardInterrupt:
        os._exit(130)
    return results.get(0)
