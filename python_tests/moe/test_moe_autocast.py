"""Experts under autocast: matmuls in bfloat16, gates and weights in float32, results near those without."""

import pytest
import torch
from torch import nn

from oases import OverlappedMoE
from oases.moe.stack import ExpertStack

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.types = []
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = OverlappedMoE(WIDTH, 2 * WIDTH, num_experts=4, gated=True)

    def before(self, x):
        mixed = self.mix(x)
        self.types.append(mixed.dtype)
        x = x + mixed
        return x, self.norm(x)

    def after(self, x, y):
        return x + y


def gradients(module, x, enabled):
    module.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        y = module(x)
    y.float().square().sum().backward()
    return [y.detach().float(), *(p.grad.clone() for p in module.parameters())]


def check(stacked):
    torch.manual_seed(0)
    module = ExpertStack([Block(), Block()]) if stacked else OverlappedMoE(WIDTH, 2 * WIDTH, num_experts=4)
    x = torch.randn(32, WIDTH)
    for parameter, found, expected in zip(
        [None, *module.parameters()], gradients(module, x, True), gradients(module, x, False), strict=True
    ):
        assert parameter is None or found.dtype == parameter.dtype == torch.float32
        scale = expected.abs().max()
        assert (found - expected).abs().max() < 0.1 * scale + 1e-6  # tokens between two experts may change over
        assert (found - expected).norm() < 0.05 * expected.norm() + 1e-6


@pytest.mark.parametrize("stacked", [False, True], ids=["layer", "stack"])
def test_results_under_autocast(two_ranks, stacked):
    two_ranks.run(check, stacked)


def check_recomputed():
    torch.manual_seed(0)
    stack = ExpertStack([Block(), Block()], recompute=True)
    gradients(stack, torch.randn(32, WIDTH), True)
    for block in stack.blocks:
        assert len(block.types) > 1
        assert set(block.types) == {torch.bfloat16}


def test_recomputation_runs_under_the_autocast_of_the_forward_pass(two_ranks):
    two_ranks.run(check_recomputed)
