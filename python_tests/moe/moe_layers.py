"""Layers of experts on given inputs, and the same computed in one process, one token after the other."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from oases.moe.costs import Costs
from oases.moe.layer import OverlappedMoE
from oases.moe.placement import Placement, owner_ranks

HIDDEN, WIDTH = 12, 10
EXACT = dict(rtol=0, atol=1e-12)
COSTS = Costs(token_seconds=1e-4, token_bytes=96, expert_bytes=2000, bandwidth=1e9)
"""Copies are cheap: whatever is unbalanced is balanced."""


def whole_layer(experts, **options):
    torch.manual_seed(7)
    layer = OverlappedMoE(HIDDEN, WIDTH, experts, dtype=torch.float64, **options)
    layer.made = experts, options
    with torch.no_grad():
        layer.router.weight *= 8
        layer.router.weight[0] += 1  # uneven loads
    return layer


def part_of(whole, **options):
    """This rank's part of a layer that every rank holds in full."""
    experts, own = whole.made
    options = {**own, "process_group": None, **options}
    with torch.random.fork_rng():
        found = OverlappedMoE(HIDDEN, WIDTH, experts, dtype=whole.router.weight.dtype, **options)
    first, last = found.experts.first, found.experts.first + found.experts.local
    held = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*found.named_parameters(), *found.named_buffers()):
            tensor.copy_(held[name][first:last] if name.startswith("experts.") else held[name])
    return found


def expert_by_hand(layer, index, x):
    experts = layer.experts
    up_bias = None if experts.up_bias is None else experts.up_bias[index]
    down_bias = None if experts.down_bias is None else experts.down_bias[index]
    middle = F.linear(x, experts.up[index], up_bias)
    if experts.gated:
        gate, up = middle.chunk(2, -1)
        middle = F.silu(gate) * up
    else:
        middle = F.gelu(middle)
    return F.linear(middle, experts.down[index], down_bias)


def kept_by_hand(router, chosen, weights):
    kept = torch.ones_like(chosen, dtype=torch.bool)
    experts = len(router.weight)
    if router.capacity_factor is not None:
        capacity = -int(-router.capacity_factor * chosen.numel() // experts)
        for expert in range(experts):
            slots = [(-weights[t, j].item(), t, j) for t, j in (chosen == expert).nonzero().tolist()]
            for _, t, j in sorted(slots)[capacity:]:
                kept[t, j] = False
    return kept


def by_hand(layer, x):
    """One token after the other."""
    router = layer.router
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if router.gate == "softmax" else logits.sigmoid()
    chosen = (scores if router.bias is None else scores + router.bias).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * router.scale
    kept = kept_by_hand(router, chosen, weights)
    rows = []
    for token in range(len(x)):
        row = 0 * x[token]
        for j in range(router.top_k):
            if kept[token, j]:
                row = row + weights[token, j] * expert_by_hand(layer, int(chosen[token, j]), x[token])
        if layer.shared is not None:
            row = row + layer.shared(x[token])
        rows.append(row)
    y = torch.stack(rows) if rows else x * 1
    loss = 0
    if router.balance_weight and len(x):
        experts, shares = len(router.weight), scores / scores.sum(-1, keepdim=True)
        fractions = F.one_hot(chosen, experts).sum((0, 1)).double() / chosen.numel()
        loss = loss + router.balance_weight * experts * (fractions * shares.mean(0)).sum()
    if router.z_weight and len(x):
        loss = loss + router.z_weight * logits.logsumexp(-1).square().mean()
    return y, loss


def inputs_of(rank, tokens):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(tokens[rank], HIDDEN, dtype=torch.float64, generator=generator) + 0.3


def targets_of(rank, tokens):
    generator = torch.Generator().manual_seed(200 + rank)
    return torch.randn(tokens[rank], HIDDEN, dtype=torch.float64, generator=generator)


def expected_of(layer, tokens):
    """(outputs, input gradients) by rank, and gradients of the whole layer; the loss is a sum over the ranks."""
    layer.zero_grad()
    outputs, gradients = [], []
    for rank in range(len(tokens)):
        x = inputs_of(rank, tokens).requires_grad_()
        y, loss = by_hand(layer, x)
        ((y * targets_of(rank, tokens)).sum() + loss).backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    return outputs, gradients, {name: p.grad for name, p in layer.named_parameters()}


def random_placement(experts, devices, seed):
    generator = np.random.default_rng(seed)
    home = owner_ranks(experts, devices)
    copies, routes = [], np.empty((experts, devices), dtype=np.int64)
    for expert in range(experts):
        held = [d for d in range(devices) if d != home[expert] and generator.random() < 0.6]
        copies.append(tuple(held))
        routes[expert] = generator.choice([home[expert], *held], devices)
    return Placement("random", tuple(copies), routes, np.zeros(devices, dtype=np.int64), 0.0)


def alone():
    """A group of this process alone; all ranks make all of them."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
