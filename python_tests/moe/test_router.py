"""The router: gates, choices, capacity, losses and their gradients, the bias that balances without a loss."""

import pytest
import torch

from oases.errors import UsageError
from oases.moe.router import Router

DOUBLE = torch.float64


def routed(router, tokens=40, seed=0):
    x = torch.randn(tokens, router.weight.shape[1], dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return x, router(x)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_choices_and_weights(gate, normalised, top_k):
    router = Router(8, 5, top_k=top_k, gate=gate, normalised=normalised, scale=1.5, dtype=DOUBLE)
    x, routing = routed(router)
    scores = (x @ router.weight.T).softmax(-1) if gate == "softmax" else (x @ router.weight.T).sigmoid()
    weights, experts = scores.topk(top_k, dim=-1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    assert torch.equal(routing.experts, experts)
    torch.testing.assert_close(routing.weights, 1.5 * weights)
    assert torch.equal(routing.counts, torch.bincount(experts.flatten(), minlength=5))
    assert routing.kept is None
    assert torch.equal(routing.demand, routing.counts)
    assert routing.balance_loss is None
    assert routing.z_loss is None
    assert not routing.faulty


def test_equal_gates_go_to_the_first_experts():
    router = Router(4, 6, top_k=2)
    with torch.no_grad():
        router.weight.zero_()
    assert router(torch.randn(3, 4)).experts.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0])
def test_beyond_capacity_the_lightest_are_dropped(factor):
    router = Router(8, 4, top_k=2, capacity_factor=factor, dtype=DOUBLE)
    with torch.no_grad():
        router.weight[0] *= 5
    _, routing = routed(router, 50)
    capacity = -int(-factor * 100 // 4)
    assert torch.equal(routing.counts, routing.demand.clamp(max=capacity))
    assert (routing.demand - routing.counts).sum() == (~routing.kept).sum() == 100 - routing.counts.sum()
    for expert in range(4):
        chosen = routing.experts == expert
        kept, dropped = routing.weights[chosen & routing.kept], routing.weights[chosen & ~routing.kept]
        assert len(kept) == routing.counts[expert]
        if len(dropped):
            assert kept.min() >= dropped.max()


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_losses_reach_the_gradient_by_themselves(gate):
    options = dict(top_k=2, gate=gate, dtype=DOUBLE)
    router = Router(8, 4, balance_weight=0.3, z_weight=0.2, **options)
    plain = Router(8, 4, **options)
    plain.load_state_dict(router.state_dict())
    for scale in (1.0, 0.25):
        router.loss_scale = scale
        x, routing = routed(router)
        x.requires_grad_()
        grad = torch.randn(40, 2, dtype=DOUBLE)
        routing = router(x)
        found = torch.autograd.grad((routing.weights * grad).sum(), [x, router.weight])
        logits = x @ plain.weight.T
        scores = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()
        fractions = torch.bincount(routing.experts.flatten(), minlength=4).double() / 80
        balance = 4 * (fractions * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        total = (plain(x).weights * grad).sum() + scale * (0.3 * balance + 0.2 * z)
        expected = torch.autograd.grad(total, [x, plain.weight])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        torch.testing.assert_close(routing.balance_loss, balance.detach())
        torch.testing.assert_close(routing.z_loss, z.detach())


def test_an_even_router_has_a_balance_loss_of_one():
    router = Router(4, 4, top_k=1, balance_weight=1.0)
    with torch.no_grad():
        router.weight.copy_(1e-3 * torch.eye(4))
    assert router(torch.eye(4)).balance_loss.item() == pytest.approx(1.0, rel=1e-3)


def test_the_bias_moves_towards_even_loads():
    router = Router(16, 8, top_k=2, bias_update_rate=2e-3, dtype=DOUBLE)
    with torch.no_grad():
        router.weight[0] += 0.3
    x = torch.randn(400, 16, dtype=DOUBLE) + 0.2
    first = router(x).demand
    before = router.bias.clone()
    router.note(first)
    router.update_bias()
    assert torch.equal(router.bias - before, 2e-3 * (100.0 - first).sign().float())
    assert not router.demand.any()
    for _ in range(200):
        router.note(router(x).demand)
        router.update_bias()
    assert router(x).demand.double().std() < 0.3 * first.double().std()
    # Choices follow the bias, weights do not.
    routing = router(x)
    scores = (x @ router.weight.T).softmax(-1).gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


def test_another_bias_routes_as_before():
    router = Router(8, 4, bias_update_rate=0.5)
    x = torch.randn(30, 8)
    before, bias = router(x).experts, router.bias.clone()
    router.note(torch.tensor([60, 0, 0, 0]))
    router.update_bias()
    assert not torch.equal(router(x).experts, before)
    assert torch.equal(router(x, bias=bias).experts, before)


def test_the_bias_is_saved_and_stays_in_float32():
    router = Router(8, 4, bias_update_rate=1e-4)
    router.note(torch.tensor([60, 0, 0, 1]))
    router.update_bias()
    router.note(torch.tensor([0, 0, 3, 1]))
    expected = router.bias.clone()
    router.to(torch.bfloat16)
    assert router.weight.dtype is torch.bfloat16
    assert torch.equal(router.bias, expected)
    other = Router(8, 4, bias_update_rate=1e-4)
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.bias, expected)
    assert other.demand.tolist() == [0, 0, 3, 1]
    assert not Router(8, 4).state_dict().keys() & {"bias", "demand"}


def test_no_tokens():
    router = Router(8, 4, balance_weight=1.0, z_weight=1.0, capacity_factor=1.0)
    routing = router(torch.zeros(0, 8))
    assert routing.counts.tolist() == [0] * 4
    routing.weights.sum().backward()
    assert not router.weight.grad.any()


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_gates_that_are_not_finite_are_marked(gate):
    router = Router(8, 4, gate=gate, capacity_factor=1.0)
    x = torch.randn(6, 8)
    assert not router(x).faulty
    x[3, 2] = float("nan")
    assert router(x).faulty


def test_a_part_of_the_tokens():
    router = Router(8, 4, capacity_factor=0.5)
    _, routing = routed(Router(8, 4, capacity_factor=0.5, dtype=DOUBLE))
    parts = [routing.part(*each, routing.weights[slice(*each)]) for each in ((0, 13), (13, 13), (13, 40))]
    assert torch.equal(sum(part.counts for part in parts), routing.counts)
    assert torch.equal(torch.cat([part.experts for part in parts]), routing.experts)
    assert router.num_experts == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k must be from 1 to num_experts = 4, got 5"),
        ({"top_k": 0}, "got 0"),
        ({"gate": "tanh"}, "unknown gate 'tanh'; known are softmax, sigmoid"),
        ({"z_weight": -1.0}, "z_weight must be at least 0, got -1"),
        ({"balance_weight": float("nan")}, "balance_weight must be at least 0, got nan"),
        ({"capacity_factor": 0.0}, "capacity_factor must be above 0, or None to drop nothing, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        Router(8, 4, **options)


def test_bad_input():
    with pytest.raises(UsageError, match=r"x must be \[tokens, 8\], got \[3, 7\]"):
        Router(8, 4)(torch.zeros(3, 7))
    with pytest.raises(UsageError, match="must be at least 1, got 0 and 4"):
        Router(0, 4)
