"""A chain of stacks of different degrees against one stack of one process on the whole batch."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from oases import OverlappedColumnLinear, OverlappedRowLinear, OverlappedStack, ParallelDropout
from oases.core.blocks.sharding import holders, sharded_parameters
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.mesh import Mesh
from oases.distributed.planned_stack import PlannedStack
from oases.layers.linear import shard
from oases.plans.gpt import gpt
from oases.plans.plan import Plan, Segment, Stage

WIDTH, BATCH = 16, 8


class Mlp(nn.Module):
    """Dropout on both sides of the sum."""

    def __init__(self, norm, up, down, dropout):
        super().__init__()
        self.norm, self.up, self.down = norm, up, down
        self.inner, self.outer = ParallelDropout(dropout, shard_dim=2), ParallelDropout(dropout)

    def partial(self, x):
        return self.down.partial(self.inner(F.gelu(self.up.partial(self.norm(x)))))

    def combine(self, x, y):
        return x + self.outer(y + self.down.bias)


@functools.cache
def layers():
    torch.manual_seed(3)
    return [
        (nn.LayerNorm(WIDTH).double(), nn.Linear(WIDTH, 32).double(), nn.Linear(32, WIDTH).double()) for _ in range(4)
    ]


def maker(dropout):
    def block(index, group):
        norm, up, down = layers()[index]
        column = OverlappedColumnLinear.from_linear(up, process_group=group)
        row = OverlappedRowLinear.from_linear(down, process_group=group)
        return Mlp(copy.deepcopy(norm), column, row, dropout)

    return block


def plan_of(world, *segments):
    made = (Stage(tuple(Segment(*segment) for segment in segments)),)
    return Plan(gpt(WIDTH, 2, 4, 4, 256), world, world, BATCH, 1, made)


def check_chain(segments, dropout):
    torch.manual_seed(0)  # masks are drawn alike where ranks have one state
    plan = plan_of(dist.get_world_size(), *segments)
    mesh = Mesh.of(plan)
    stack = PlannedStack(plan, maker(dropout), mesh)
    average = GradientAverager(stack.parts())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    plain = OverlappedStack(
        [maker(dropout)(index, alone) for index in range(4)], process_group=alone, schedule="sync"
    )
    assert stack.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(BATCH, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    first, last = stack.first_degree, stack.last_degree
    expected = plain(x)
    expected.square().mean().backward()
    mine = x.chunk(mesh.replicas(first))[mesh.replica(first)].clone().requires_grad_()
    with average.overlapped():
        y = stack(mine)
        y.square().mean().backward()
    torch.testing.assert_close(y, expected.chunk(mesh.replicas(last))[mesh.replica(last)], rtol=1e-12, atol=1e-12)
    dims, found = {name: dim for name, _, dim in sharded_parameters(stack)}, holders(stack)
    for name, parameter in stack.named_parameters():
        whole = plain.get_parameter(name).grad
        if name in dims:
            whole = shard(whole, dims[name], found[id(parameter)].process_group)
        torch.testing.assert_close(parameter.grad, whole, rtol=1e-11, atol=1e-13)
    stack.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(stack(mine), plain(x).chunk(mesh.replicas(last))[mesh.replica(last)])
    mesh.destroy()
    dist.destroy_process_group(alone)


CHAINS = [
    [(4, 1)],
    [(2, 2, "oases", 2), (2, 4, "cross_pass", 2)],
    [(1, 4, "oases", 2, 1), (2, 1), (1, 2, "sync", 1)],
]


@pytest.mark.long
def test_chains_equal_one_stack(four_ranks):
    for segments in CHAINS:
        four_ranks.run(check_chain, segments, 0.0)


@pytest.mark.parametrize(
    "segments", [*(pytest.param(each, marks=pytest.mark.long) for each in CHAINS[:2]), CHAINS[2]]
)
def test_masks_are_those_of_one_stack(four_ranks, segments):
    """Replicas drop what the model that nobody cut drops, and segments not what the first one does."""
    four_ranks.run(check_chain, segments, 0.3)
