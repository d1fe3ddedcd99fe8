"""Bytes of quantised collectives, counted by the kernel at each rank's sockets, beside those that are reported."""

import os
import socket
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oases.core.execution.communication import add_wire
from oases.core.execution.group import group_of, scheduler_of

PART, TIMES = 128 * 1024, 8
"""Numbers of a rank's part, and collectives that are counted."""
_SENT, _SENT_AGAIN = 200, 208
"""Places of tcpi_bytes_sent and tcpi_bytes_retrans in Linux's struct tcp_info, from 4.19 on."""


def sent_by_sockets():
    """Bytes that this process's open TCP connections have sent so far, without retransmissions."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            copy = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=copy) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                continue
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        total += struct.unpack_from("Q", info, _SENT)[0] - struct.unpack_from("Q", info, _SENT_AGAIN)[0]
    return total


def started(scheduler, kind, x, code):
    """Ticket of a collective in which each rank's part of the whole are the numbers x."""
    size = dist.get_world_size()
    if kind == "all_reduce":
        return scheduler.all_reduce(x.repeat(size), kind, wire=code)
    if kind == "reduce_scatter":
        return scheduler.reduce_scatter(torch.empty_like(x), x.repeat(size, 1), kind, code)
    if kind == "all_gather":
        return scheduler.all_gather(x.new_empty(size, len(x)), x, kind, code)
    rows = [1] * size
    return scheduler.all_to_all(x.new_empty(size, len(x)), x.repeat(size, 1), rows, rows, kind, code)


def counted(kind, code):
    """Bytes of some collectives that this rank sent: by the sockets, and by the backend's own count."""
    group = dist.new_group(backend="gloo")
    scheduler = scheduler_of(group)
    backend = None
    if code:
        backend = group_of(add_wire(group))._get_backend(torch.device("cpu"))
    x = torch.randn(PART)
    scheduler.wait(started(scheduler, kind, x, code))  # to connect
    dist.barrier(group)
    before, known = sent_by_sockets(), backend.bytes_sent if backend else 0
    for _ in range(TIMES):
        scheduler.wait(started(scheduler, kind, x, code))
    dist.barrier(group)
    return sent_by_sockets() - before, (backend.bytes_sent if backend else 0) - known


def check_bytes(ranks, pool, kind):
    whole = [sent for sent, _ in pool.run(counted, kind, "")]
    shots = 2 if kind == "all_reduce" else 1
    for (sent, known), exact in zip(pool.run(counted, kind, "int8"), whole, strict=True):
        assert known == TIMES * shots * (ranks - 1) * (PART + PART // 128 * 4)
        # Besides: headers of messages, barriers, and what the ranks' store hears meanwhile.
        assert known <= sent <= 1.02 * known + 50_000
        assert sent < exact * (1 / 4 + 1 / 128) * 1.1


KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
needs_counters = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (4, 19), reason="this kernel counts no sent bytes"
)


@needs_counters
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_send_what_is_reported(two_ranks, kind):
    check_bytes(2, two_ranks, kind)


@needs_counters
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_four_ranks_send_what_is_reported(four_ranks, kind):
    check_bytes(4, four_ranks, kind)
