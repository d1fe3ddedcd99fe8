"""Averaged gradients: of which backward pass, over which ranks, in which buckets, and how early they are sent."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from oases.core.execution.group import scheduler_of
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.mesh import Mesh
from oases.errors import UsageError


def model_and_batches():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, torch.randn(3, 8, 6, dtype=torch.float64)  # micro-batches of 8 samples


def check_average(bucket_bytes):
    mesh = Mesh([1])
    group, rank, ranks = mesh.data(1), dist.get_rank(), dist.get_world_size()
    plain, batches = model_and_batches()
    sum(plain(batch).square().mean() for batch in batches).backward()
    model, _ = model_and_batches()
    scheduler = scheduler_of(group)
    average = GradientAverager([(model.parameters(), group)], bucket_bytes)
    for _ in range(2):  # the second step has gradients of its own
        model.zero_grad()
        for batch in batches[:-1]:
            model(batch.chunk(ranks)[rank]).square().mean().backward()
        sent = sum(total.count for total in scheduler.totals().values())
        with average.overlapped():
            model(batches[-1].chunk(ranks)[rank]).square().mean().backward()
        now = sum(total.count for total in scheduler.totals().values())
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-13, atol=1e-15)
    average.remove()
    model(batches[0]).sum().backward()
    mesh.destroy()
    return now - sent


def test_only_the_last_micro_batch_communicates(two_ranks, four_ranks):
    assert two_ranks.run(check_average, 1) == [6, 6]  # one bucket for each parameter
    assert two_ranks.run(check_average, 200) == [3, 3]
    assert four_ranks.run(check_average, 1 << 20) == [1, 1, 1, 1]


def check_early():
    """The last layer's gradients are on their way before the first layer has its own."""
    mesh = Mesh([1])
    model, batches = model_and_batches()
    average = GradientAverager([(model.parameters(), mesh.data(1))], bucket_bytes=1)
    started = []

    def look(_):
        started.append(sum(bucket.sent is not None for lane in average._lanes for bucket in lane.buckets))

    model[0].weight.register_post_accumulate_grad_hook(look)
    with average.overlapped():
        model(batches[0]).sum().backward()
    mesh.destroy()
    return started[0]


def test_sums_start_while_the_backward_pass_runs(two_ranks):
    assert min(two_ranks.run(check_early)) >= 4


def check_parts():
    """A tied parameter, one that a rank does not use, one that is frozen, and parts of two groups."""
    mesh = Mesh([1, 2])
    rank = dist.get_rank()
    tied, unused, frozen, other = (nn.Parameter(torch.full((2,), 1.0)) for _ in range(4))
    frozen.requires_grad_(False)
    parts = [([tied, frozen], mesh.data(1)), ([other], mesh.data(2)), ([unused, tied], mesh.data(1))]
    average = GradientAverager(parts)
    with average.overlapped():
        loss = (tied * tied * (rank + 1)).sum() + (other * rank).sum() + frozen.sum()
        (loss + unused.sum() if rank == 0 else loss).backward()
    assert torch.equal(tied.grad, torch.full((2,), 5.0))  # 2 x mean of 1, 2, 3, 4
    assert torch.equal(unused.grad, torch.full((2,), 0.25))
    assert torch.equal(other.grad, torch.full((2,), (rank + (rank + 2) % 4) / 2))
    assert frozen.grad is None
    mesh.destroy()


def test_parts_of_a_model(four_ranks):
    four_ranks.run(check_parts)


def test_without_replicas_nothing_is_sent():
    model, batches = model_and_batches()
    with GradientAverager([(model.parameters(), None)]).overlapped():
        model(batches[0]).sum().backward()
    assert model[0].weight.grad is not None


def check_sizes():
    """One rank trains a parameter that the other froze."""
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(UsageError, match=r"numbers in each bucket differs .*\(8,\) on rank 0, \(6,\) on rank 1"):
        GradientAverager([(module.parameters(), dist.group.WORLD)])


def test_ranks_with_other_parameters_are_told(two_ranks):
    two_ranks.run(check_sizes)
