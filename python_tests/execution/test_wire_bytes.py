"""Bytes of quantised sums, counted by the kernel at the sockets of each rank, beside those that are reported."""

import os
import socket
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oases.execution.group import group_of, scheduler_of
from oases.execution.wire import add_wire

NUMBERS, SUMS = 128 * 4096, 8
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


def counted(code):
    """Bytes of some sums that this rank sent: by the sockets, and by the backend's own count."""
    scheduler = scheduler_of(dist.group.WORLD)
    backend = None
    if code:
        backend = group_of(add_wire(dist.group.WORLD, code))._get_backend(torch.device("cpu"))
    x = torch.randn(NUMBERS)
    scheduler.wait(scheduler.all_reduce(x.clone(), "to connect", wire=code))
    dist.barrier()
    before, known = sent_by_sockets(), backend.bytes_sent if backend else 0
    for _ in range(SUMS):
        scheduler.wait(scheduler.all_reduce(x.clone(), "counted at the sockets", wire=code))
    dist.barrier()
    return sent_by_sockets() - before, (backend.bytes_sent if backend else 0) - known


def check_bytes(ranks, pool):
    whole = [sent for sent, _ in pool.run(counted, "")]
    for code, bits in (("int8", 8), ("int4", 4)):
        part = NUMBERS // ranks
        packed = part * bits // 8 + part // 128 * 4
        for (sent, known), exact in zip(pool.run(counted, code), whole, strict=True):
            assert known == SUMS * 2 * (ranks - 1) * packed
            # Besides: headers of messages, barriers, and what the ranks' store hears meanwhile.
            assert known <= sent <= 1.02 * known + 50_000
            assert sent < exact * (bits / 32 + 1 / 128) * 1.1


needs_counters = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (4, 19), reason="this kernel counts no sent bytes"
)


@needs_counters
def test_two_ranks_send_what_is_reported(two_ranks):
    check_bytes(2, two_ranks)


@needs_counters
def test_four_ranks_send_what_is_reported(four_ranks):
    check_bytes(4, four_ranks)
