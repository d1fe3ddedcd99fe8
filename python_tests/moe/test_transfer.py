"""Trans and Agg over real ranks against the whole of the parameters."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe.moe_layers import random_placement

from oases.core.execution.group import scheduler_of
from oases.moe.experts import ExpertWeights
from oases.moe.placement import Placement
from oases.moe.transfer import Transfer, tie

SHAPES = [(5, 3), (3, 5), (5,), (3,)]


def whole_weights(experts, biased, dtype):
    generator = torch.Generator().manual_seed(4)
    found = [torch.randint(-8, 9, (experts, *shape), generator=generator).to(dtype) for shape in SHAPES]
    return found if biased else found[:2]


def gradients_of(rank, experts, biased, dtype):
    generator = torch.Generator().manual_seed(50 + rank)
    found = [torch.randint(-8, 9, (experts, *shape), generator=generator).to(dtype) for shape in SHAPES]
    return found if biased else found[:2]


def check(experts, placement, biased, dtype, apart):
    rank, size = dist.get_rank(), dist.get_world_size()
    local = experts // size
    mine = slice(rank * local, (rank + 1) * local)
    whole = whole_weights(experts, biased, dtype)
    parameters = [weight[mine].clone().requires_grad_() for weight in whole]
    weights = ExpertWeights(*parameters)
    transfer = Transfer(weights, placement, dist.group.WORLD, "test")
    assert transfer.held == [e for e in placement.moved if rank in placement.copies[e]]
    scheduler = scheduler_of(dist.group.WORLD)
    scheduler.reset_totals()
    gradients = [gradient[transfer.held] for gradient in gradients_of(rank, experts, biased, dtype)]
    if apart:  # piece by piece, without autograd
        transfer.scatter(parameters)
        transfer.exchange()
        copies = transfer.finish()
    else:
        found, number = transfer.receive(transfer.send(weights))
        copies = found.given
    for copy, weight in zip(copies, whole, strict=True):
        assert torch.equal(copy, weight[transfer.held])
    sent = sum(totals.bytes for totals in scheduler.totals().values())
    assert transfer.bytes == sent
    if apart:
        transfer.reduce(gradients)
        transfer.gather()
        results = transfer.zeros()
        transfer.collect(results)
    else:
        total = tie(torch.zeros(1, dtype=dtype), number).sum()
        total = total + sum((copy * gradient).sum() for copy, gradient in zip(copies, gradients, strict=True))
        total.backward()
        results = [parameter.grad for parameter in parameters]
    for index, result in enumerate(results):
        for expert in range(mine.start, mine.stop):
            expected = torch.zeros_like(whole[index][expert])
            for holder in placement.copies[expert]:
                expected += gradients_of(holder, experts, biased, dtype)[index][expert]
            assert torch.equal(result[expert - mine.start], expected)
    return sent


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_there_and_gradients_back(two_ranks, four_ranks, biased, apart, dtype):
    for seed in range(3):
        four_ranks.run(check, 8, random_placement(8, 4, seed), biased, dtype, apart)
        two_ranks.run(check, 2, random_placement(2, 2, seed), biased, dtype, apart)


def placed(copies):
    experts = len(copies)
    return Placement("test", copies, np.zeros((experts, 4), dtype=np.int64), np.zeros(4, dtype=np.int64), 0.0)


def test_a_home_sends_an_expert_once_to_any_number_of_holders(four_ranks):
    sent = four_ranks.run(check, 4, placed(((1, 2, 3), (), (), ())), False, torch.float64, False)
    size = 8 * 30
    assert sent[0] == size
    assert sum(sent) == size + 2 * size  # each holder gives its third to two others


def test_ranks_without_part_take_part(four_ranks):
    sent = four_ranks.run(check, 4, placed(((2,), (), (), ())), True, torch.float64, False)
    assert sent == [8 * 38, 0, 0, 0]
    sent = four_ranks.run(check, 4, placed(((), (), (0,), (0, 1))), True, torch.float64, True)
    assert sent[2:] == [8 * 38, 8 * 38]


def frozen(placement):
    """Without a gradient nothing is sent back; with one for some, the others get none."""
    whole = whole_weights(4, True, torch.float64)
    rank = dist.get_rank()
    parameters = [weight[rank : rank + 1].clone().requires_grad_(index == 1) for index, weight in enumerate(whole)]
    transfer = Transfer(ExpertWeights(*parameters), placement, dist.group.WORLD, "test")
    copies, number = transfer.receive(transfer.send(ExpertWeights(*parameters)))
    tie(copies.down.flatten(), number).sum().backward()
    assert parameters[0].grad is None
    return parameters[1].grad.sum().item()


def test_frozen_parameters_have_no_gradient(four_ranks):
    assert four_ranks.run(frozen, placed(((1, 3), (), (), (0,)))) == [30.0, 0.0, 0.0, 15.0]
