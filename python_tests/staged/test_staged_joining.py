"""Ranks of the backend `staged`: how they come together, or why they do not, and who else gets their memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oases.core.execution.group import scheduler_of
from oases.extension import QuantizedBackend, single_process_backend
from oases_staged.extension import staged_backend

pytestmark = pytest.mark.long

NOBODY = 65534
"""A user without rights."""


def machine() -> str:
    """Name of this machine, as ranks write it to the store."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def join_beside(entry: str | None, seconds: float = 60.0) -> str:
    """First line of the error of rank 0 of two, whose rank 1 left this in the store."""
    store = dist.HashStore()
    if entry is not None:
        store.set("staged/1", entry)
    with pytest.raises((ValueError, dist.DistBackendError)) as caught:
        staged_backend(store, 0, 2, timedelta(seconds=seconds))
    return f"{type(caught.value).__name__}: {str(caught.value).splitlines()[0]}"


def test_ranks_of_another_machine_are_refused():
    said = join_beside("11111111-2222-3333-4444-555555555555-4026531836 1 1 -1 0 0")
    assert said.startswith("ValueError: staged joins ranks of one machine, but rank 1 is on another one than rank 0")


def test_a_rank_that_never_comes_is_named():
    assert join_beside(None, 0.3).endswith("staged: timed out after 300 ms waiting for rank 1 to join")


def test_a_rank_that_ended_while_ranks_join_is_named_before_the_timeout():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    said = join_beside(f"{machine()} {process.pid} 1 -1 0 0", 3600.0)
    assert said == f"DistBackendError: staged: rank 1 (process {process.pid}) has ended"


def test_a_rank_that_gives_up_tells_the_others():
    store = dist.HashStore()
    said = []

    def join(rank: int, seconds: float) -> None:
        with pytest.raises(dist.DistBackendError) as caught:
            staged_backend(store, rank, 3, timedelta(seconds=seconds))
        said.append(str(caught.value).splitlines()[0])

    patient = threading.Thread(target=join, args=(0, 3600.0))
    patient.start()
    join(1, 0.3)
    patient.join()
    assert said == ["staged: timed out after 300 ms waiting for rank 2 to join"] * 2


def test_a_rank_that_cannot_make_the_memory_tells_the_others():
    store, said = dist.HashStore(), dict[int, str]()

    def join(rank: int) -> None:
        with pytest.raises(RuntimeError) as caught:
            staged_backend(store, rank, 2, timedelta(seconds=60))
        said[rank] = str(caught.value).splitlines()[0]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    other = threading.Thread(target=join, args=(1,))
    other.start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        join(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    other.join()
    assert "bytes of shared memory are not available: File too large" in said[0]
    assert said[1] == f"staged: rank 0 failed to join: {said[0]}"


def memory_files() -> list[str]:
    """This process's files under /proc that are memory of the backend."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links += [str(link)] if "oases-staged" in os.readlink(link) else []
    return [link.replace("self", str(os.getpid())) for link in links]


def seen_while_joining() -> tuple[bool, bool, str]:
    """Whether this rank fails in the end, a child forked while it joins has its file, and what other users get."""
    store, errors = dist.HashStore(), []

    def join() -> None:
        try:
            staged_backend(store, 0, 2, timedelta(seconds=60))
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    while not memory_files():
        time.sleep(0.01)
    (path,) = memory_files()
    os.close(os.open(path, os.O_RDWR))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        kept = bool(memory_files())
        said = "not root"
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                os.open(path, os.O_RDWR)
                said = "opened"
            except PermissionError:
                said = "refused"
        os.write(write, f"{kept} {said}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    kept, said = os.read(read, 100).decode().split(" ", 1)
    os.close(read)
    os.close(write)
    store.set("staged/1", "elsewhere 1 1 -1 0 0")
    thread.join()
    return len(errors) == 1, kept == "True", said


def test_the_file_is_for_ranks_alone_while_they_join(two_ranks):
    found = two_ranks.run(seen_while_joining)
    assert found == [(True, False, "refused" if os.getuid() == 0 else "not root")] * 2


def use_in_fork(use: Any) -> str:
    """Error of a use in a forked child, which then ends as Python does."""
    got, put = os.pipe()
    if (child := os.fork()) == 0:
        try:
            use()
        except RuntimeError as error:
            os.write(put, str(error).encode())
        finally:
            os._exit(0)
    os.close(put)
    said = os.fdopen(got).read()
    os.waitpid(child, 0)
    return said


def forks() -> list[str]:
    group, x = dist.new_group(backend="staged"), torch.ones(3)
    dist.all_reduce(x, group=group)
    scheduler, other = scheduler_of(dist.group.WORLD), dist.get_rank() ^ 1
    uses = [
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
        lambda: dist.send(x, other, group=group),
        lambda: scheduler.wait(scheduler.all_reduce(x)),  # over gloo
    ]
    said = [use_in_fork(use) for use in uses]
    dist.all_reduce(x, group=group)
    assert x.tolist() == [4.0] * 3
    return said


def test_a_fork_that_uses_a_group_raises(two_ranks):
    for said in two_ranks.run(forks):
        assert all("in a fork of the process that created its process group" in each for each in said), said


PAGE, PROTECTION, PRIVATE_AT_A_PLACE = 4096, 3, 0x02 | 0x20 | 0x10
"""Arguments of mmap: bytes, read and write, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED."""


def mapped(of: str = "") -> list[range]:
    """Addresses of this process's mappings whose line in /proc contains `of`."""
    lines = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if of in line]
    return [range(int(first, 16), int(last, 16)) for first, last in lines]


def dropped_in_a_fork() -> str:
    """Answer of a forked child that drops groups, and has memory of its own where theirs was."""
    options = dist.AllreduceOptions()
    options.asyncOp = True
    before = mapped("oases-staged")
    staged = staged_backend(dist.HashStore(), 0, 1, timedelta(seconds=60))
    quantized = QuantizedBackend(single_process_backend(0, 2))
    for backend in (staged, quantized):
        backend.allreduce([torch.ones(8)], options).wait()
    (place,) = (each.start for each in mapped("oases-staged") if each not in before)
    got, put = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with pytest.raises(RuntimeError, match="ALLREDUCE was called in a fork of the process that created"):
                quantized.allreduce([torch.ones(8)], options)
            mmap = ctypes.CDLL(None).mmap
            mmap.restype = ctypes.c_void_p
            mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            assert not any(place in each for each in mapped())
            assert mmap(place, PAGE, PROTECTION, PRIVATE_AT_A_PLACE, -1, 0) == place
            del staged, quantized, backend
            os.write(put, b"kept" if any(place in each for each in mapped()) else b"unmapped")
        except BaseException as error:
            os.write(put, repr(error).encode())
        finally:
            os._exit(0)
    os.close(put)
    if not select.select([got], [], [], 60.0)[0]:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return os.fdopen(got).read()


def test_a_fork_drops_groups(two_ranks):
    assert two_ranks.run(dropped_in_a_fork) == ["kept"] * 2
