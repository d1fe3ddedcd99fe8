"""Scatter and gather of uneven shards, of which a rank may hold none, with their gradients."""

import torch
import torch.distributed as dist

from oases.core.blocks.sharding import Cut
from oases.distributed.collectives import gather, scatter

CUTS = [Cut(0, (0,)), Cut(0, (1,)), Cut(0, (5,)), Cut(1, (8,)), Cut(-1, (1, 2, 3))]


def check_cuts():
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for cut in CUTS:
        shape = [4, 3]
        shape[cut.dim] = cut.size
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        part = scatter(x, group, cut, "scattered")
        torch.testing.assert_close(part, cut.take(x, rank, ranks), rtol=0, atol=0)
        y = gather(part * 2, group, cut, "gathered")
        torch.testing.assert_close(y, 2 * x, rtol=0, atol=0)
        weights = torch.arange(1.0, x.numel() + 1).view_as(x)
        (y * weights).sum().backward()
        torch.testing.assert_close(x.grad, 2 * weights, rtol=0, atol=0)


def test_shards_of_any_length(two_ranks):
    two_ranks.run(check_cuts)
