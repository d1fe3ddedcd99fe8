"""Memory that outlives ranks: anonymous files (memfd), a pair per rank, held by a process that ends with the run.

They have no name in any folder, so nothing is left behind however the run ends. oases' launcher keeps those of its
ranks. Beside torchrun each rank starts a keeper, a small process that ends with torchrun. Ranks open the files as
/proc/PROCESS/fd/NUMBER, which the kernel allows to the same user. Linux only.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from oases.errors import UsageError

PAIR = 2
"""Files per rank: while one is written, the other is whole."""
_KEPT = "OASES_MEMORY"
"""Variable of the ranks: the launcher's process and its file descriptors, as PROCESS:FIRST,SECOND,..."""
_PATIENCE_SECONDS = 20.0
_KEEPER = """
import os, select, socket, sys
name, parent, *kept = sys.argv[1:]
server = socket.socket(socket.AF_UNIX)
server.bind("\\0" + name)
server.listen()
life = os.pidfd_open(int(parent))
while life not in (ready := select.select([life, server], [], [])[0]):
    server.accept()[0].sendall(",".join(kept).encode())
"""


@contextmanager
def kept_for(ranks: int) -> Iterator[None]:
    """Keep files for ranks that this process starts meanwhile; they take no memory until they are written."""
    if not hasattr(os, "memfd_create"):
        yield
        return
    descriptors = [os.memfd_create("oases") for _ in range(PAIR * ranks)]
    os.environ[_KEPT] = f"{os.getpid()}:{','.join(map(str, descriptors))}"
    try:
        yield
    finally:
        del os.environ[_KEPT]
        for descriptor in descriptors:
            os.close(descriptor)


def open_pair() -> list[int]:
    """Open this rank's files; returns their descriptors. UsageError where nothing outlives the rank."""
    if not hasattr(os, "memfd_create"):
        raise UsageError(f"memory_every needs Linux, and this is {sys.platform}; leave it out")
    if "TORCHELASTIC_RUN_ID" in os.environ and _KEPT not in os.environ:
        place = _kept_by_keeper()
    elif _KEPT in os.environ:
        place = os.environ[_KEPT]
    else:
        raise UsageError(
            "memory_every needs a launcher that restarts the ranks: start them by `oases train --max-restarts N` or "
            "torchrun, or leave it out"
        )
    process, _, numbers = place.partition(":")
    descriptors = numbers.split(",")
    first = PAIR * int(os.environ["RANK"]) if len(descriptors) > PAIR else 0
    return [os.open(f"/proc/{process}/fd/{number}", os.O_RDWR) for number in descriptors[first : first + PAIR]]


def _kept_by_keeper() -> str:
    """Ask the keeper of this rank's place on its node, started by an earlier rank or now."""
    parent = os.getppid()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    name = f"oases-memory-{namespace}-{parent}-{os.environ['LOCAL_RANK']}"
    end = time.monotonic() + _PATIENCE_SECONDS
    started = False
    while True:
        with suppress(ConnectionRefusedError):
            return _ask(name)
        if not started:
            _start_keeper(name, parent)
            started = True
        if time.monotonic() > end:
            raise TimeoutError(f"the keeper of this rank's memory did not start within {_PATIENCE_SECONDS:g} s")
        time.sleep(0.01)


def _ask(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + name)
        process, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise UsageError(f"socket @{name} belongs to user {user}; leave out memory_every on this machine")
        numbers = connection.recv(100).decode()
    return f"{process}:{numbers}"


def _start_keeper(name: str, parent: int) -> None:
    descriptors = [os.memfd_create("oases") for _ in range(PAIR)]
    # A session of its own: torchrun ends those of its ranks.
    subprocess.Popen(
        [sys.executable, "-IS", "-c", _KEEPER, name, str(parent), *map(str, descriptors)], pass_fds=descriptors,
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for descriptor in descriptors:
        os.close(descriptor)
