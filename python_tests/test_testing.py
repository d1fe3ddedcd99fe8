"""The pool of ranks that tests run on."""

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oases import OverlappedRowLinear
from oases.testing import RankPool


def who():
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return dist.get_rank(), int(ranks), os.getpid()


def stumble():
    if dist.get_rank() == 1:
        raise ValueError("a stone")


def leave():
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(1e6)


@pytest.mark.long
def test_a_call_that_failed_leaves_no_trace():
    with RankPool(2) as ranks:
        before = ranks.run(who)
        assert [told[:2] for told in before] == [(0, 2), (1, 2)]
        assert ranks.run(who) == before  # the same processes
        with pytest.raises(RuntimeError, match=r"rank 1 failed:\n(.*\n)*ValueError: a stone"):
            ranks.run(stumble)
        with pytest.raises(RuntimeError, match="rank 1 ended with exit code 3"):
            ranks.run(leave)
        after = ranks.run(who)
        assert [told[:2] for told in after] == [(0, 2), (1, 2)]
        assert not {pid for *_, pid in before} & {pid for *_, pid in after}


def reduced():
    linear = OverlappedRowLinear(4, 4, process_group=dist.new_group([0, 1]))
    linear(torch.randn(2, 2)).sum().backward()


def polling():
    """Threads of gloo in this process, of groups that are there or were not given back."""
    names = []
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            names.append(each.joinpath("comm").read_text().strip())
    return names.count("gloo_tcp_loop")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_destroyed_groups_leave_no_threads():
    """Whatever keeps a work of a collective keeps its group, whose threads poll."""
    with RankPool(2) as ranks:
        ranks.run(who)
        before = ranks.run(polling)
        for _ in range(4):
            ranks.run(reduced)
        after = ranks.run(polling)
    assert all(late - early < 4 for early, late in zip(before, after, strict=True))  # the last may be going
