"""Modules that average their gradients over replicas by themselves, against one process with the whole batch."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from autotp.comparison import said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from oases.core.execution.group import scheduler_of
from oases.distributed.replicas import average_replicas, data_parallel_group, replicas_of
from oases.errors import UsageError
from oases.testing import RankPool


class Tied(nn.Module):
    """A weight used twice, a part that some passes leave out, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x, extra=False):
        x = self.second(self.first(x).tanh())
        return self.extra(x) if extra else x


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))


def made():
    torch.manual_seed(7)
    return Tied().double(), torch.randn(3, 4, 4, dtype=torch.float64)  # three micro-batches


def compare(module, plain):
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        expected = torch.zeros_like(mine) if theirs.grad is None and mine.requires_grad else theirs.grad
        torch.testing.assert_close(mine.grad, expected, rtol=1e-13, atol=1e-15)


def check_gradients():
    """A copy, parameters frozen and thawed, accumulation with and without no_sync, a part that one rank skips."""
    (plain, batches), (module, _) = made(), made()
    average_replicas(module, mesh())
    rank, sent = dist.get_rank(), scheduler_of(data_parallel_group(mesh())).totals
    module = copy.deepcopy(module)
    for frozen in (False, True):
        for each in (plain, module):
            each.zero_grad()
            each.first.bias.requires_grad_(not frozen)
        halves = [batch.chunk(2) for batch in batches]
        for mine in halves:
            for at, half in enumerate(mine):
                (plain(half, extra=at == 1).square().mean() / 2).backward()
        with module.no_sync():
            module(halves[0][rank], extra=rank == 1).square().mean().backward()
            before = sum(each.count for each in sent().values())
        module(halves[1][rank], extra=rank == 1).square().mean().backward()
        assert sum(each.count for each in sent().values()) > before
        module(halves[2][rank], extra=rank == 1).square().mean().backward()
        compare(module, plain)


def check_early():
    """Buckets that are on their way before the first layer has its gradients."""
    module = nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(8)])  # 39 MB, three buckets
    average_replicas(module, mesh())
    x, started = torch.randn(2, 1100), []
    module(x)

    def look(*_):
        (lane,) = replicas_of(module)._average._lanes
        started.append([bucket.sent is not None for bucket in lane.buckets])

    module[1].register_full_backward_hook(look)
    module(x).sum().backward()
    return started[0]


def check_refusals():
    module, _ = made()
    average_replicas(module, mesh())
    with pytest.raises(UsageError, match=r'averages its gradients by itself.*call the model as it is.*mesh\["tp"\]'):
        DistributedDataParallel(module)
    other, _ = made()
    average_replicas(other, mesh()["tp"])  # no dimension for data: as it was
    assert replicas_of(other) is None
    DistributedDataParallel(other)


def check_a_head():
    """A backbone that averages in a classifier that does not: the first step says so."""
    backbone, _ = made()
    average_replicas(backbone, mesh())
    model = nn.Sequential(backbone, nn.Linear(4, 2).double())
    backbone(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.optim.SGD(backbone.parameters(), lr=0.1).step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.step()
    return [str(each.message) for each in found]


def drifts():
    """The error of a loop in which the first rank adds other noise than the rest."""
    module, batches = made()
    average_replicas(module, mesh())

    def train():
        for step in range(3):
            module(batches[step]).square().mean().backward()
            if dist.get_rank() == 0:
                module.first.bias.data.add_(1e-9)

    return said(train)


@pytest.mark.long
def test_replicas_that_go_apart_are_told_of():
    with RankPool(2) as ranks:
        for found in ranks.run(drifts):
            assert "1 parameters, such as one of shape [4], differ" in found or "see the output of rank" in found


def test_parameters_around_a_model_that_averages_are_told_of(two_ranks):
    for found in two_ranks.run(check_a_head):
        (text,) = found
        assert "updates 2 parameters, such as one of shape [2, 4]" in text
        assert "not averaged" in text


def test_gradients_are_those_of_the_whole_batch(two_ranks):
    two_ranks.run(check_gradients)


def test_buckets_are_sent_while_the_backward_pass_runs(two_ranks):
    for sent in two_ranks.run(check_early):
        assert sent[0]
        assert not sent[-1]


def test_wrappers_that_would_average_again_are_refused(two_ranks):
    two_ranks.run(check_refusals)
