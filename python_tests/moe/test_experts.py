"""Experts: the grouped matmul against the loop, weights that do not depend on the number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from oases.errors import UsageError
from oases.moe.experts import Experts, can_group, compute, middle_of

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0], [2, 3, 1, 3]]


def by_hand(experts, rows, counts):
    parts = []
    for index, part in enumerate(rows.split(counts)):
        up_bias = None if experts.up_bias is None else experts.up_bias[index]
        down_bias = None if experts.down_bias is None else experts.down_bias[index]
        middle = F.linear(part, experts.up[index], up_bias)
        if experts.gated:
            half = middle.shape[1] // 2
            middle = F.silu(middle[:, :half]) * middle[:, half:]
        else:
            middle = F.gelu(middle)
        parts.append(F.linear(middle, experts.down[index], down_bias))
    return torch.cat(parts)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_runs_of_tokens(gated, bias, counts, grouped, dtype):
    experts = Experts(16, 24, 4, gated=gated, bias=bias, dtype=dtype)
    rows = torch.randn(sum(counts), 16).to(dtype).requires_grad_()
    if grouped and not can_group(rows, experts.weights):
        assert dtype is torch.float64 or not hasattr(F, "grouped_mm")
        return
    y = compute(rows, counts, experts.weights, middle_of(gated), grouped=grouped)
    expected = by_hand(experts, rows, counts)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(y)
    inputs = [rows, *experts.parameters()]
    found = torch.autograd.grad(y, inputs, grad)
    for a, b in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_what_torch_can_group():
    rows = torch.zeros(4, 16)
    assert can_group(rows, Experts(16, 24, 4).weights) == hasattr(F, "grouped_mm")
    assert not can_group(rows, Experts(16, 24, 4, dtype=torch.float64).weights)
    assert not can_group(torch.zeros(4, 15), Experts(15, 24, 4).weights)
    with torch.no_grad():
        Experts(15, 10, 4)(torch.zeros(4, 15), [1, 1, 1, 1])


def test_a_sum_has_a_gradient():
    experts = Experts(16, 24, 2)
    experts(torch.randn(5, 16), [2, 3]).sum().backward()
    assert experts.up.grad.any()


def drawn(num_experts):
    torch.manual_seed(11)
    experts = Experts(8, 6, num_experts, gated=True, bias=True, process_group=dist.group.WORLD)
    return experts.first, [p.detach() for p in experts.parameters()], torch.rand(1)


@pytest.mark.slow
def test_weights_do_not_depend_on_the_ranks(two_ranks, four_ranks):
    torch.manual_seed(11)
    whole = Experts(8, 6, 4, gated=True, bias=True)
    after = torch.rand(1)
    for ranks in (two_ranks, four_ranks):
        results = ranks.run(drawn, 4)
        assert [first for first, *_ in results] == list(range(0, 4, 4 // ranks.size))
        for index, parameter in enumerate(whole.parameters()):
            assert torch.equal(torch.cat([parts[index] for _, parts, _ in results]), parameter)
        assert all(torch.equal(number, after) for *_, number in results)
    for expert in range(4):
        assert whole.up[expert].abs().max() <= 8**-0.5
        assert whole.down[expert].abs().max() <= 6**-0.5
    assert not torch.equal(whole.up[0], whole.up[1])


def test_bad_counts():
    experts = Experts(8, 6, 2)
    with pytest.raises(UsageError, match=r"5 rows for 2 experts do not fit counts \[2, 2\]"):
        experts(torch.zeros(5, 8), [2, 2])
    with pytest.raises(UsageError, match="do not fit counts"):
        experts(torch.zeros(5, 8), [2, 2, 1])
    with pytest.raises(UsageError, match="must be at least 1, got 8 and 0"):
        Experts(8, 0, 2)


def three_over_two():
    with pytest.raises(UsageError, match="3 experts do not divide over 2 devices"):
        Experts(8, 6, 3)


def test_experts_that_the_ranks_do_not_divide(two_ranks):
    two_ranks.run(three_over_two)
