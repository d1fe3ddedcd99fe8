"""Compiled blocks defer weight gradients and leave out products as uncompiled ones do, counted by op."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from oases import OverlappedColumnLinear, OverlappedStack
from oases.layers import weight_gradient as compiled
from oases.layers.weight_gradient import DeferredGradients, linear


class Mlp(nn.Module):
    """Column, a matmul with a weight that is computed, and row, in Conv1D's layout.

    scaled: the row's result is read again before the sum.
    """

    def __init__(self, scaled):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(4), OverlappedColumnLinear(4, 8)
        self.middle, self.down, self.scaled = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 4)), scaled

    def partial(self, x):
        h = linear(F.gelu(self.up.partial(self.norm(x))), self.middle / 2)
        y = linear(h, self.down, transposed=True)
        return F.gelu(y) if self.scaled else y

    def combine(self, x, y):
        return x + y


def products(stack, x, autocast):
    """Output, gradients, and the numbers of products in a step and in its ops W, after a step that compiles."""
    original = DeferredGradients.compute

    def compute(self):
        with record_function("W"):
            original(self)

    DeferredGradients.compute = compute
    try:
        for _ in range(2):
            stack.zero_grad()
            mine = x.clone().requires_grad_()
            with profile(activities=[ProfilerActivity.CPU]) as found:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = stack(mine)
                y.square().sum().backward()
    finally:
        DeferredGradients.compute = original
    events = found.events()
    within = [each.time_range for each in events if each.name == "W"]
    made = [each.time_range for each in events if each.name in ("aten::mm", "aten::addmm", "aten::addmm_")]
    deferred = sum(any(w.start <= each.start and each.end <= w.end for w in within) for each in made)
    return [y, mine.grad, *(each.grad for each in stack.parameters())], len(made), deferred


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("backend", "recompute"),
    [
        ("aot_eager", "none"), ("aot_eager", "full"), pytest.param("inductor", "none", marks=pytest.mark.slow),
        pytest.param("inductor", "full", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_as_many_products_of_which_as_many_are_deferred(backend, recompute, autocast, scaled):
    torch._dynamo.reset()
    blocks = [Mlp(scaled).to(torch.float32 if autocast else torch.float64) for _ in range(2)]
    plain, traced = (OverlappedStack(blocks, schedule="oases", recompute=recompute) for _ in range(2))
    traced.compile_blocks(backend=backend, fullgraph=True)
    x = torch.randn(4, 3, 4, dtype=torch.float32 if autocast else torch.float64)
    expected, number, deferred = products(plain, x, autocast)
    found, *numbers = products(traced, x, autocast)
    assert numbers == [number, deferred]
    assert deferred == 2 * 2 * 2, "two linears of two blocks in two sub-batches"
    tolerance = {"rtol": 0.03, "atol": 0.3} if autocast else {}
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert not compiled._open, "nothing is held after the step"
