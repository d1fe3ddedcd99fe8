"""Ends of the backend `staged`: ranks that are killed at any moment, and groups that are dropped."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oases.launch import fork_server
from oases.launch.agents import loopback_store
from oases_staged.extension import staged_backend

pytestmark = pytest.mark.long


def endless(rank: int, size: int, nodes: int, port: int, group: int, timeout: timedelta, connection: Any) -> None:
    """Collectives and messages for ever; sends the first error to the parent."""
    fork_server.release_signals()
    from oases_staged import make_staged

    torch.set_num_threads(1)
    local = {"LOCAL_WORLD_SIZE": size // nodes, "WORLD_SIZE": size, "GROUP_RANK": rank // (size // nodes)}
    os.environ |= {name: str(value) for name, value in local.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    try:
        store = dist.PrefixStore(str(group), dist.TCPStore("127.0.0.1", port, timeout=timeout))
        backend = make_staged(store, rank, size, timeout)
        connection.send(shared_inode())
        for seed in itertools.count():
            case, tensor = random.Random(seed), torch.ones(random.Random(seed).choice([1, 5000, 2_000_000]))
            if case.random() < 0.3:
                sent = backend.send([tensor], (rank + 1) % size, 0)
                backend.recv([torch.empty_like(tensor)], (rank - 1) % size, 0).wait()
                sent.wait()
            elif case.random() < 0.5:
                backend.allreduce([tensor]).wait()
            else:
                backend.alltoall_base(torch.empty(size * 1000), torch.ones(size * 1000), [], []).wait()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def kill_one(group: int, port: int, joined: bool, patience: float, nodes: int = 1) -> None:
    """Kill a rank of three, or of two on each node, at a random moment: the others must say so, nothing may stay.

    joined: after all have joined; otherwise a rank that nobody knows yet is found by the timeout of joining alone.
    patience: seconds after the kill within which the others must say so.
    """
    chance, context, inodes = random.Random(group), fork_server.context(), set[int]()
    size = 3 if nodes == 1 else 2 * nodes
    timeout = timedelta(seconds=60 if joined else 4)
    ends, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        arguments = (fork_server.Launcher(), endless, rank, size, nodes, port, group, timeout, theirs)
        processes.append(context.Process(target=fork_server.as_started_by, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    victim = chance.randrange(size)
    try:
        if joined:
            for end in ends:
                assert end.poll(60), "ranks did not join"
                inodes.add(end.recv())
            assert len(inodes) == nodes
            assert holders(inodes), "what is looked for below can be seen"
        time.sleep(chance.uniform(0, 0.2))
        end_of_patience = time.monotonic() + patience
        os.kill(processes[victim].pid, signal.SIGKILL)
        for rank in set(range(size)) - {victim}:
            said: Any = 0
            while isinstance(said, int):
                left = max(0.0, end_of_patience - time.monotonic())
                assert ends[rank].poll(left), f"{group}: rank {rank} hangs after rank {victim} was killed"
                said = ends[rank].recv()
                inodes |= {said} if isinstance(said, int) else set()
            named = f"rank {victim} (process {processes[victim].pid}) has ended" in said
            # A rank that fails ends, too, and another may see that first, or its sockets be closed.
            followed = "has left the group" in said or "has ended" in said or "aborted the group" in said
            followed = followed or (nodes > 1 and "gloo" in said)
            never = not joined and re.search(rf"waiting for .*rank {victim}\b.* to join", said)
            assert named or followed or never, said
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    assert holders(inodes) == [], "shared memory is left"


def shared_inode() -> int:
    """Number of the file whose memory this process has mapped for its only group."""
    (inode,) = {
        int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines() if "oases-st" in line
    }
    return inode


def holders(inodes: set[int]) -> list[str]:
    """Processes of this machine that have the memory of a group, mapped or as a file: without one it is freed."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = [line.split() for line in (process / "maps").read_text().splitlines() if "oases-staged" in line]
            mapped = {int(line[4]) for line in lines}
            files = [link for link in (process / "fd").iterdir() if "oases-staged" in os.readlink(link)]
            opened = {link.stat().st_ino for link in files}
        except OSError:  # it has ended, or is another user's
            continue
        found += [process.name] * bool((mapped | opened) & inodes)
    return found


@pytest.mark.long
def test_a_killed_rank_ends_the_waits_of_the_others():
    store = loopback_store()
    for group in (0, 1):
        kill_one(group, store.port, True, 60.0)


@pytest.mark.slow
def test_kills_over_nodes():
    store = loopback_store()
    for group in range(20):
        kill_one(group, store.port, True, 10.0, nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_kills(part):
    store = loopback_store()
    for group in range(50 * part, 50 * part + 50):
        kill_one(group, store.port, group % 4 > 0, 10.0)


DROPPED = """
import torch
import torch.distributed as dist
from datetime import timedelta
from oases.extension import QuantizedBackend, sim_backend, single_process_backend
from oases_staged.extension import staged_backend

options = dist.AllreduceOptions()
options.asyncOp = True
for backend in (
    staged_backend(dist.HashStore(), 0, 1, timedelta(seconds=60)),
    sim_backend(single_process_backend(0, 2), 1e-3, 1e9),
    QuantizedBackend(single_process_backend(0, 2)),
):
    for _ in range(50):
        backend.allreduce([torch.ones(100_000)], options)
    del backend
print("ended")
"""


@pytest.mark.long
def test_groups_end_while_collectives_are_queued_whose_tensors_nobody_else_has():
    """A thread of the backend frees them, which takes Python's lock, while Python waits for the thread's end."""
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "ended\n", done.stderr


def sends_a_part(port: int, connection: Any) -> None:
    """Rank 1 of two: begin a message of which shared memory holds a part, say so, and wait."""
    fork_server.release_signals()
    backend = staged_backend(dist.TCPStore("127.0.0.1", port), 1, 2, timedelta(seconds=60))
    work = backend.send([torch.ones(1_000_000)], 0, 0)
    time.sleep(0.3)  # a thread sends it
    connection.send(os.getpid())
    connection.recv()  # which nobody sends
    work.wait()


def stop(process: int) -> None:
    """Stop all threads of a process: a signal alone does so some time later."""
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + 60
    while any(
        path.read_text().rpartition(")")[2].split()[0] != "T" for path in Path(f"/proc/{process}/task").glob("*/stat")
    ):
        assert time.monotonic() < end, "it does not stop"
        time.sleep(0.01)


@pytest.mark.long
def test_a_sender_that_is_killed_in_the_middle_of_a_message_is_noticed():
    """After what it has left is taken, nothing more is queued: yet the receiver goes on to look after it."""
    context, store = fork_server.context(), loopback_store()
    ours, theirs = context.Pipe()
    arguments = (fork_server.Launcher(), sends_a_part, store.port, theirs)
    process = context.Process(target=fork_server.as_started_by, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        backend = staged_backend(dist.TCPStore("127.0.0.1", store.port), 0, 2, timedelta(seconds=60))
        assert ours.poll(60)
        ours.recv()
        stop(process.pid)
        work = backend.recv([torch.empty(1_000_000)], 1, 0)
        time.sleep(0.5)  # it takes what is there
        process.kill()
        process.join()
        with pytest.raises(dist.DistBackendError, match=rf"recv: rank 1 \(process {process.pid}\) has ended"):
            work.wait(timedelta(seconds=5))  # the receiver's own is 60 s, and with nothing to wait for it looks in 10
    finally:
        process.kill()
        process.join(10)


ASKED = """
import threading
import time
import torch
import torch.distributed as dist
from oases.extension import OverlapScheduler

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
started = threading.Event()


class Slow(dist.ProcessGroup):
    "A group that is written in Python, and so takes its lock while a collective starts."

    def getGroupName(self):
        return "slow"

    def allreduce(self, tensors, options):
        started.set()
        time.sleep(0.5)
        return dist.all_reduce(tensors[0], async_op=True)


group = Slow(0, 2)
scheduler = OverlapScheduler(group)
thread = threading.Thread(target=lambda: scheduler.wait(scheduler.all_reduce(torch.ones(3))))
thread.start()
assert started.wait(60)
assert scheduler.errors() == {} and scheduler.exempted() == {}
thread.join()
dist.destroy_process_group()
print("ended")
"""


@pytest.mark.long
def test_a_scheduler_is_asked_while_a_collective_starts_that_takes_pythons_lock():
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "ended\n", done.stderr
