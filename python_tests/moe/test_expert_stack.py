"""Stacks of experts: every schedule, placement and recomputation gives what the blocks give one after another."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe.expert_blocks import COSTS, EXPERTS, HIDDEN, made
from torch import nn

from oases.core.execution.executor import Context
from oases.core.schedule.ops import STARTS
from oases.errors import UsageError
from oases.moe.placement import owner_ranks, plan
from oases.moe.stack import ExpertStack
from oases.plans.expert_schedules import EXPERT_SCHEDULES, generate_experts


def drawn_placement(rng, devices):
    """Copies anywhere, and tokens to any device that holds the expert."""
    home = owner_ranks(EXPERTS, devices)
    counts = rng.integers(0, 5, (EXPERTS, devices))
    base = plan(counts, COSTS, method="none")
    copies, routes = [], base.routes.copy()
    for expert in range(EXPERTS):
        held = [d for d in range(devices) if d != home[expert] and rng.random() < 0.5]
        copies.append(tuple(held))
        routes[expert] = rng.choice([int(home[expert]), *held], devices)
    return type(base)("drawn", tuple(copies), routes, base.device_loads, 0.0)


def results(run, blocks, steps=3, seed=0):
    """Outputs, input gradients and parameter gradients of some steps."""
    found = []
    for step in range(steps):
        torch.manual_seed(100 * seed + 10 * step + (dist.get_rank() if dist.is_initialized() else 0))
        x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
        y = run(x)
        y.square().sum().backward()
        parameters = [p for block in blocks for p in block.parameters()]
        found += [y.detach(), x.grad, *(p.grad.clone() for p in parameters)]
        for p in parameters:
            p.grad = None
    return found


def check(name, placement, recompute, seed, dropout=0.0, shared=0):
    options = {"placement": "none" if placement == "drawn" else placement, "shared_intermediate": shared}
    devices = dist.get_world_size() if dist.is_initialized() else 1
    alone, together = (made(dropout, **options) for _ in range(2))
    for one, other in zip(alone, together, strict=True):
        other.load_state_dict(one.state_dict())
    if placement == "drawn":
        for number, pair in enumerate(zip(alone, together, strict=True)):
            drawn = drawn_placement(np.random.default_rng(seed + number), devices)
            for block in pair:
                block.experts.place(drawn)
    stack = ExpertStack(together, schedule=name, recompute=recompute)
    expected = results(nn.Sequential(*alone), alone, seed=seed)
    found = results(stack, together, seed=seed)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-13)
    if placement not in ("none", "drawn") and devices > 1:
        assert any(block.experts.last.placement.moved for block in together) or placement == "eplb"
    with torch.no_grad():
        x = torch.randn(3, HIDDEN, dtype=torch.float64)
        torch.testing.assert_close(stack.eval()(x), nn.Sequential(*alone).eval()(x))


CASES = [
    pytest.param(
        name, placement, recompute, marks=[] if name == "plain" or (i + j) % 2 == recompute else pytest.mark.slow
    )
    for (i, name), (j, placement) in itertools.product(
        enumerate(EXPERT_SCHEDULES), enumerate(("none", "prophet", "faster_moe", "drawn"))
    )
    for recompute in (False, True)
    if name != "plain" or placement == "none"
]
"""Every pair of schedule, placement and recomputation; all triples in `make test-slow`."""


@pytest.mark.few(3, 4)
@pytest.mark.parametrize(("name", "placement", "recompute"), CASES)
def test_a_stack_gives_what_its_blocks_give(four_ranks, name, placement, recompute):
    four_ranks.run(check, name, placement, recompute, 1, 0.0, 6)


@pytest.mark.parametrize("name", EXPERT_SCHEDULES)
def test_one_process_and_dropout(name):
    check(name, "none", False, 2, shared=6)
    check(name, "none", True, 2, 0.3)


def check_spans():
    blocks = made(placement="prophet")
    stack = ExpertStack(blocks)
    for _ in range(2):
        context = Context([])
        stack(torch.randn(4, HIDDEN, dtype=torch.float64), context=context).sum().backward()
    listed = [str(op) for op in stack.schedule if op.kind not in STARTS]
    assert [name for name, _, _ in context.spans] == listed
    loss = stack(torch.randn(4, HIDDEN, dtype=torch.float64, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        loss.backward()


def test_ops_run_as_they_are_listed(two_ranks):
    two_ranks.run(check_spans)


def test_stacks_that_cannot_be():
    with pytest.raises(UsageError, match="no blocks"):
        ExpertStack([])
    with pytest.raises(UsageError, match="block 0, Linear, has no OverlappedMoE called experts"):
        ExpertStack([nn.Linear(2, 2)])
    with pytest.raises(UsageError, match="moves no experts, and placement is 'prophet'"):
        ExpertStack(made(), schedule="plain")
    with pytest.raises(UsageError, match="is for 2 blocks, but 3 are required"):
        ExpertStack(made(), schedule=generate_experts("block_wise", 2))
