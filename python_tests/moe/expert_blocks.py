"""Blocks with experts for stacks of them."""

import torch
from torch import nn

from oases.moe.costs import Costs
from oases.moe.layer import OverlappedMoE

HIDDEN, EXPERTS, BLOCKS = 8, 8, 3
COSTS = Costs(token_seconds=1e-5, token_bytes=64, expert_bytes=1024, bandwidth=1e8, non_expert_seconds=1e-4)


class Block(nn.Module):
    """A linear layer in place of attention, then experts."""

    def __init__(self, number, dropout=0.0, **options):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.experts = OverlappedMoE(HIDDEN, 12, EXPERTS, dtype=torch.float64, name=f"block {number}", **options)

    def before(self, x):
        x = x + self.dropout(self.mix(x))
        return x, self.norm(x)

    def after(self, x, y):
        return x + y

    def forward(self, x):
        x, h = self.before(x)
        return self.after(x, self.experts(h))


def made(dropout=0.0, **options):
    torch.manual_seed(3)
    own = {"gated": True, "bias": True, "balance_weight": 0.1, "z_weight": 0.01, "top_k": 2, **options}
    return [Block(number, dropout, costs=COSTS, **own) for number in range(BLOCKS)]
