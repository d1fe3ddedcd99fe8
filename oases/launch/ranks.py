"""Start of a run's ranks through torchrun's API, and their end with a message that names the cause.

Outside torchrun a command starts its own ranks; under torchrun each process is one of them already.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from oases.errors import SAVED_EXIT_CODE, SavedExit, UsageError
from oases.launch import fork_server
from oases.launch.agents import RankFailedError, launch
from oases.limits import MOST_LOCAL_RANKS
from oases.testbed import Backend, Nodes

_LATER_SECONDS = 1.0
"""A rank that hears of a failure leaves this much later than the one that failed, which the launcher then names."""
_RESTARTS = "OASES_RESTARTS"
"""Environment variable of the ranks: number of restarts by `run_ranks`."""


@dataclass(frozen=True)
class RankOptions:
    """Settings of a run's ranks.

    timeout_seconds: limit for a collective. nodes: nodes of the testbed to place the ranks on, for a process behind
    their link; None: one node. asked: option that determined the number of ranks, for errors; empty: --tp.
    max_restarts: restarts of all ranks after one failed. fewer: (size, arguments) of the function to go on with, in
    turn, after a restart that made no progress (`report_progress`): what failed then is lost for good. exit_code,
    progress: shared values, set by `run_ranks`, in which ranks that ended with their state saved leave their exit
    code, and ranks report progress.
    """

    size: int
    backend: Backend = field(default_factory=Backend)
    timeout_seconds: float = 300.0
    nodes: Nodes | None = None
    asked: str = ""
    max_restarts: int = 0
    fewer: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    exit_code: Any = None
    progress: Any = None

    def __post_init__(self) -> None:
        if self.size > MOST_LOCAL_RANKS and not (self.backend.single_process or under_torchrun()):
            asked = self.asked or f"--tp {self.size}"
            raise UsageError(
                f"{asked} needs {self.size} ranks, and oases starts up to {MOST_LOCAL_RANKS} on a machine; give a "
                "smaller degree, or start the ranks on several machines by torchrun"
            )


_progress: Any = None
"""The shared value of this rank's options."""


def report_progress() -> None:
    """Tell the launcher that this start of the ranks works."""
    if _progress is not None:
        _progress.value = 1


def restart_count() -> int:
    """Return the number of restarts of this rank's run, by torchrun or by oases."""
    return sum(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", _RESTARTS))


def under_torchrun() -> bool:
    """Return whether torchrun, or another launcher that sets RANK and WORLD_SIZE, started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def run_ranks(function: Callable[..., Any], arguments: tuple[Any, ...], options: RankOptions) -> Any:
    """Call `function(*arguments)` on `options.size` ranks; return rank 0's result.

    Exits with the exit code of the rank that failed first, which has printed the reason. UsageError if a launcher
    started a different number of ranks, or they cannot be divided evenly among the nodes.
    """
    if under_torchrun():
        given = int(os.environ["WORLD_SIZE"])
        if given != options.size:
            asked = options.asked or f"--tp {options.size}"
            raise UsageError(
                f"{asked} needs {options.size} ranks, but the launcher gives {given}; start it "
                f"with torchrun --nproc-per-node {options.size}, or without torchrun"
            )
        return _rank_main(function, arguments, options)
    if options.backend.single_process:
        return _stand_for_all(function, arguments, options)
    return _launch(function, arguments, options)


def _stand_for_all(function: Callable[..., Any], arguments: tuple[Any, ...], options: RankOptions) -> Any:
    """Run as rank 0 of a fake group in this process."""
    dist.init_process_group(
        options.backend.activate(), store=dist.HashStore(), rank=0, world_size=options.size,
        timeout=timedelta(seconds=options.timeout_seconds),
    )  # fmt: skip
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def _launch(function: Callable[..., Any], arguments: tuple[Any, ...], options: RankOptions) -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.size)))
    # Not the agent's own restarts: agents of several nodes do not restart together, and they would repeat errors that
    # no restart can fix.
    spawn = multiprocessing.get_context("spawn")
    saved, progress = spawn.Value("i", 0, lock=False), spawn.Value("i", 0, lock=False)
    options = replace(options, exit_code=saved, progress=progress)
    try:
        for restart in range(options.max_restarts + 1):
            os.environ[_RESTARTS] = str(restart)
            progress.value = 0
            try:
                return launch(_rank_main, (function, arguments, options), options.size, options.nodes)
            except RankFailedError as error:
                how = ""
                if restart and not progress.value and options.fewer:
                    before, ((size, arguments), *fewer) = options.size, options.fewer
                    options = replace(options, size=size, fewer=tuple(fewer))
                    how = f" with {size} ranks instead of {before}"
                _restart_or_exit(error, saved.value, restart, options.max_restarts, how)
    except KeyboardInterrupt:
        if not saved.value:
            print("oases: interrupted", file=sys.stderr)
        sys.exit(saved.value or 130)
    finally:
        del os.environ[_RESTARTS]
    raise AssertionError("the last start returns or exits")


def _restart_or_exit(error: RankFailedError, saved: int, restart: int, max_restarts: int, how_many: str = "") -> None:
    """Exit, with the saved-exit code of the ranks or one for the failure, unless they are to be restarted."""
    if error.exit_code == 2 or saved:  # an error that no restart can fix
        sys.exit(saved or 2)
    how = f"exit code {error.exit_code}"
    if error.exit_code < 0:
        how = f"signal {signal.Signals(-error.exit_code).name}"
    then = f"restart {restart + 1} of {max_restarts}{how_many}" if restart < max_restarts else "the run is over"
    print(f"oases: {error.who} ended with {how}; {then}", file=sys.stderr, flush=True)
    if restart == max_restarts:
        sys.exit(1)


def _rank_main(function: Callable[..., Any], arguments: tuple[Any, ...], options: RankOptions) -> Any:
    global _progress
    _progress = options.progress
    gc.freeze()  # what was imported: collections would walk it again and again while layers are traced
    fork_server.die_with_parent()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = options.backend.cuda
    os.environ |= (_CUDA if cuda else {}) | os.environ
    if options.nodes is None:
        _take_core(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", options.size)), alone=not cuda)
    else:
        _take_core(rank, options.size)  # all nodes share this machine's
    # With staged, too: checkpoints have a gloo group of their own.
    if options.backend.name in ("gloo", "sim", "staged") and os.environ.get("MASTER_ADDR") in (
        "localhost",
        "127.0.0.1",
    ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for number in fork_server.HELD_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # also in a store or in gloo; the launcher says so
    fork_server.release_signals()
    try:
        _join(options, local_rank)
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        return result
    except UsageError as error:
        from oases.core.execution.failure import has_failed

        if rank == 0 or has_failed() or not dist.is_initialized():  # else all ranks raise it
            print(f"oases: error: {error}", file=sys.stderr, flush=True)
        _leave(2)
    except SavedExit as ended:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, now that other ranks leave
        if rank == 0:
            print(f"oases: {ended.message}", file=sys.stderr, flush=True)
        if options.exit_code is not None:
            options.exit_code.value = SAVED_EXIT_CODE
        _leave(SAVED_EXIT_CODE)
    except Exception as error:
        _leave_after(error, rank)


def _leave_after(error: Exception, rank: int) -> NoReturn:
    """Exit with the failure: a traceback where it is this rank's own, else a line, and later."""
    from oases.core.execution.failure import FailedRankError
    from oases.distributed.failures import lost_a_rank

    lost = lost_a_rank(error.__cause__ or error)
    if not (lost or (isinstance(error, FailedRankError) and error.failure.rank != rank)):
        print(f"oases: rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        _leave(1)
    why, waiting = (str(error).strip().splitlines() or [""])[0], _waiting_for()
    if isinstance(error, dist.DistNetworkError):
        why = f"the connection to the ranks' store is lost: {why}"
    if lost and waiting and "waited for" not in why:
        why += f" while it waited for {waiting}"
    who = "" if why.startswith(f"rank {rank} ") else f"rank {rank}: "
    print(f"oases: {who}{why}", file=sys.stderr, flush=True)
    time.sleep(_LATER_SECONDS)
    _leave(1)


def _join(options: RankOptions, local_rank: int) -> None:
    """Initialise the default group."""
    extra: dict[str, Any] = {}
    nccl = options.backend.name == "nccl"
    # Ranks of NCCL have a GPU each, unless it was told that they share some; those of staged may share one.
    if options.backend.cuda and (not nccl or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1"):
        local_rank %= torch.cuda.device_count()
    if options.backend.cuda:
        torch.cuda.set_device(local_rank)
    if nccl:
        from oases.core.execution.group import nccl_options

        extra = {"pg_options": nccl_options(), "device_id": torch.device("cuda", local_rank)}
    timeout = timedelta(seconds=options.timeout_seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store outlives restarts, and the previous ranks left their addresses in it.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        extra |= {"rank": int(os.environ["RANK"]), "world_size": options.size}
        extra["store"] = dist.PrefixStore(f"oases/attempt {attempt}", store)
    try:
        dist.init_process_group(options.backend.activate(), timeout=timeout, **extra)
    except (dist.DistError, ValueError) as error:
        raise UsageError(_why_apart(str(error), options)) from error


def _why_apart(error: str, options: RankOptions) -> str:
    """Why the ranks did not come together, by the error of torch, with the remedy."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    rank = os.environ.get("RANK", "")
    if "EADDRINUSE" in error:
        return f"port {port} is in use on this machine; give the ranks a free one, by MASTER_PORT or --master-port"
    if "clients joined" in error:
        found = re.search(r"(\d+)/\d+ clients", error)
        came = found[1] if found else "not all"
        return (
            f"{came} of {options.size} ranks came to {address}:{port} within {options.timeout_seconds:g} s; start "
            f"the missing ones with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE={options.size}"
        )
    if "client socket" in error:
        return (
            f"rank {rank} cannot reach rank 0 at {address}:{port}; check MASTER_ADDR and MASTER_PORT, that rank 0 "
            "has started, and the firewall between them"
        )
    first = (error.strip().splitlines() or [""])[0]
    return f"rank {rank} cannot join the others at {address}:{port}: {first}; check MASTER_ADDR and MASTER_PORT"


def _leave(code: int) -> NoReturn:
    # Not sys.exit: destructors of a group with a dead member may wait for it.
    sys.stdout.flush()
    os._exit(code)


_CUDA = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""Set before CUDA starts. A queue for each stream of a run: with 8, the default, two of its streams share one, and a
collective that waits for its peers holds up another's. Kernels loaded at the start: loading one waits for the device,
which a receive that is posted ahead keeps busy.
"""


def _take_core(rank: int, size: int, *, alone: bool = True) -> None:
    """Give a rank one core where cores are few, otherwise an equal share of the threads.

    rank, size: among the ranks on this machine. alone: False where threads that work for the rank beside it, such as
    NCCL's, would be held on that core too.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if alone and cores and len(cores) <= size:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
    elif cores:
        torch.set_num_threads(max(1, len(cores) // size))


def _waiting_for() -> str:
    if not dist.is_initialized():
        return ""
    from oases.core.execution.group import scheduler_of
    from oases.distributed import messages

    # A plan has several groups; torch lists all of this process.
    groups = list(dist.distributed_c10d._world.pg_map)
    found = next((text for text in (str(scheduler_of(group).waiting_for()) for group in groups) if text), "")
    return found or messages.waiting_for()


def require_agreement(settings: dict[str, Any]) -> None:
    """Raise UsageError unless all ranks have the same settings; the message names the first that differs.

    settings: plain values by name. Makes one all-gather, to be called once at start.
    """
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, settings)
    for rank, other in enumerate(everyone):
        for name in sorted({*everyone[0], *other}):
            first, mine = everyone[0].get(name), other.get(name)
            if first != mine:
                raise UsageError(
                    f"the ranks disagree on '{name}': {first!r} on rank 0, {mine!r} on rank {rank}; start "
                    "every rank with the same arguments"
                )
