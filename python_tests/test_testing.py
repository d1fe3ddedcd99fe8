"""The pool of ranks that tests run on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

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
