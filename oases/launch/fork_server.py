"""The fork server of multiprocessing: ranks are forked from a process that has imported torch once for all of them.

Where a platform has no fork server, ranks are spawned and each imports torch itself.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, reduction, resource_tracker, util
from typing import Any

MODULES = ["torch.distributed", "torch._dynamo"]
"""Modules that the server imports; append to it before the first rank is started. torch's optimizers import the
second, which takes as long as all the rest of torch."""

HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that are blocked in ranks until those handle them, so that an early one ends them without a traceback."""

_FOLDER = "OASES_FORK_SERVER_FOLDER"
"""Variable with the temporary folder of the server's socket, set while the server starts."""
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h
_SET_BY_AGENT = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)


def start(modules: Iterable[str] = ()) -> str:
    """Start the fork server unless it runs; return the start method for ranks, "forkserver" or "spawn".

    Returns at once: the server imports `modules` and MODULES while this process does other work.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *MODULES, *modules])
    resource_tracker.ensure_running()  # its start would unblock the signals
    os.environ[_FOLDER] = util.get_temp_dir()
    try:
        with signals_held():
            forkserver.ensure_running()
    finally:
        del os.environ[_FOLDER]
    return "forkserver"


def context(modules: Iterable[str] = ()) -> Any:
    """Return the multiprocessing context that ranks are started with."""
    return multiprocessing.get_context(start(modules))


@contextmanager
def signals_held() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM at the end only; processes started meanwhile block both."""
    if threading.current_thread() is not threading.main_thread():  # which alone may have handlers
        yield
        return
    got: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: got.append(number)) for number in HELD_SIGNALS}
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)  # in this thread, and in what it starts
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
        for number, handler in before.items():
            signal.signal(number, handler)
    if got:
        raise KeyboardInterrupt


def release_signals() -> None:
    """Unblock the signals that were held at the start of this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)


class Launcher:
    """Environment, stdout and stderr of the process that starts a rank, sent along with the rank's arguments.

    A fork server has those of the time when it was started, which the launcher may have changed since.
    """

    def __init__(self, environment: dict[str, str] | None = None, streams: dict[int, Any] | None = None) -> None:
        self._environment = dict(os.environ) if environment is None else environment
        self._streams = streams or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Launcher, (
            self._environment,
            {number: reduction.DupFd(number) for number in (1, 2) if _is_open(number)},
        )

    def take_over(self) -> None:
        """Set environment and streams in a new process; variables that an elastic agent has set for it stay."""
        ours = {name: value for name, value in os.environ.items() if _SET_BY_AGENT.fullmatch(name)}
        os.environ.clear()
        os.environ.update({**self._environment, **ours})
        for number, duplicate in self._streams.items():
            descriptor = duplicate.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


def as_started_by(launcher: Launcher, entrypoint: Callable[..., Any], *arguments: Any) -> Any:
    """Call `entrypoint(*arguments)` in a new process with the environment, stdout and stderr of its launcher."""
    launcher.take_over()
    return entrypoint(*arguments)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def die_with_parent() -> None:
    """Kill this process when the one that started it by multiprocessing dies, however that ends.

    Linux signals the death of a parent. A forked rank's parent is the server, which outlives the launcher as long as
    it has ranks, so a thread waits for the launcher's end of a pipe.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent.is_alive():
        os._exit(1)
    if os.getppid() != parent.pid:
        threading.Thread(target=_follow, args=(parent.sentinel,), name="oases-parent", daemon=True).start()


def _follow(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


if _FOLDER in os.environ:  # in the server, whose launcher removes the folder but when it is killed
    atexit.register(shutil.rmtree, os.environ.pop(_FOLDER), ignore_errors=True)
