"""The layer on real ranks against one process with loops: outputs and all gradients, whatever the placement."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe.moe_layers import (
    COSTS,
    EXACT,
    HIDDEN,
    WIDTH,
    alone,
    expected_of,
    inputs_of,
    part_of,
    random_placement,
    targets_of,
    whole_layer,
)

import oases
from oases.moe.dispatch import RoutingError
from oases.moe.layer import OverlappedMoE


def compare(layer, whole, outputs, gradients, parameters, tokens, run=None):
    """One training step of every rank's layer against one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer.zero_grad()
    x = inputs_of(rank, tokens).requires_grad_()
    y = layer(x) if run is None else run(layer, x)
    (y * targets_of(rank, tokens)).sum().backward()
    torch.testing.assert_close(y, outputs[rank], **EXACT)
    torch.testing.assert_close(x.grad, gradients[rank], **EXACT)
    local = len(whole.experts.up) // size
    for name, parameter in layer.named_parameters():
        expected = parameters[name]
        grad = parameter.grad
        if name.startswith("experts."):
            expected = expected[rank * local : (rank + 1) * local]
        else:
            dist.all_reduce(grad)  # as data parallelism does
        torch.testing.assert_close(grad, expected, **EXACT)


def check_exact(experts, tokens, options, placements, seeds):
    whole = whole_layer(experts, process_group=alone(), **options)
    results = expected_of(whole, tokens)
    last = None
    for method in placements:
        layer = part_of(whole, placement=method, costs=COSTS)
        for _ in range(3):  # the second has a placement by the loads of the first
            compare(layer, whole, *results, tokens)
        last = layer.last
        loads = np.bincount(last.placement.routes.ravel(), last.counts.ravel(), dist.get_world_size())
        assert last.device_loads.tolist() == loads.tolist()
    layer = part_of(whole)
    for seed in seeds:
        layer.place(random_placement(experts, dist.get_world_size(), seed))
        compare(layer, whole, *results, tokens)
    return (
        last.counts.tolist(),
        last.dropped,
        last.balance_degree,
        last.balance_degree_at_home,
        bool(last.placement.moved),
    )


ALL = ("none", "faster_moe", "eplb", "prophet")
OPTIONS = {
    "plain": {},
    "gated": dict(gated=True, bias=True, shared_intermediate=6, shared_gate=True),
    "sigmoid": dict(gate="sigmoid", scale=2.5, balance_weight=0.3, z_weight=0.1, gated=True),
    "top1": dict(top_k=1, balance_weight=0.1, bias=True),
    "capacity": dict(capacity_factor=0.7, balance_weight=0.2),
    "top3": dict(top_k=3, normalised=False, shared_intermediate=4),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_equal_one_process(two_ranks, name):
    for result in two_ranks.run(check_exact, 4, [17, 9], OPTIONS[name], ALL, range(3)):
        _, dropped, after, before, moved = result
        assert moved or name in ("capacity", "top3")  # those are even
        assert after <= before
        assert (dropped > 0) == (name == "capacity")


@pytest.mark.few(1, 2)
@pytest.mark.parametrize("name", ["gated", "top1"])
@pytest.mark.parametrize("experts", [4, 8])
def test_four_ranks_equal_one_process(four_ranks, name, experts):
    four_ranks.run(check_exact, experts, [11, 0, 23, 6], OPTIONS[name], ALL, range(4))


def check_wire(wire, tokens):
    """A layer and a stack of it: outputs and gradients close to one process's; bytes of tokens."""
    whole = whole_layer(4, process_group=alone()).float()
    layer = part_of(whole, costs=COSTS, placement="none", wire_dtype=wire)
    rank = dist.get_rank()
    x = inputs_of(rank, tokens).float()
    found = []
    for run in (whole, layer):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        found.append((y.detach(), leaf.grad))
    apart = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)]
    exact = part_of(whole, costs=COSTS, placement="none")
    exact(x)
    return apart, layer.last.token_bytes / exact.last.token_bytes


@pytest.mark.parametrize(("wire", "most", "part"), [("bfloat16", 0.02, 1 / 2), ("int8", 0.05, 33 / 128)])
def test_tokens_on_a_wire(two_ranks, wire, most, part):
    for apart, fewer in two_ranks.run(check_wire, wire, [17, 9]):
        assert all(0 < each < most for each in apart)
        assert fewer == pytest.approx(part, rel=0.01)


def check_other_wires():
    layer = OverlappedMoE(HIDDEN, WIDTH, 4, costs=COSTS, wire_dtype=("int8", None)[dist.get_rank()])
    with pytest.raises(RoutingError, match="rank 1 has another layer"):
        layer(torch.ones(3, HIDDEN))
    return True


def test_ranks_with_other_wires_raise(two_ranks):
    assert all(two_ranks.run(check_other_wires))


def check_one_expert(tokens):
    """All tokens to expert 1; the others get none."""
    whole = whole_layer(4, process_group=alone(), top_k=1, normalised=False, bias_update_rate=1e-9)
    with torch.no_grad():
        whole.router.weight.zero_()
    whole.router.bias[1] = 1.0
    results = expected_of(whole, tokens)
    for method in ALL:
        layer = part_of(whole, placement=method, costs=COSTS, process_group=dist.group.WORLD)
        for _ in range(3):
            compare(layer, whole, *results, tokens)
    assert layer.last.counts.sum(1).tolist() == [0, sum(tokens), 0, 0]
    assert layer.last.balance_degree < layer.last.balance_degree_at_home


@pytest.mark.long
def test_all_tokens_to_one_expert(two_ranks, four_ranks):
    two_ranks.run(check_one_expert, [12, 8])
    four_ranks.run(check_one_expert, [12, 8, 8, 8])


def check_nobody_has_tokens():
    whole = whole_layer(
        4, process_group=alone(), shared_intermediate=4, capacity_factor=1.0, balance_weight=0.1, z_weight=0.1
    )
    layer = part_of(whole, costs=COSTS)
    layer.place(random_placement(4, 2, 0))
    x = torch.zeros(0, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    for parameter in layer.parameters():
        assert not parameter.grad.any()


def test_no_tokens_at_all(two_ranks):
    two_ranks.run(check_nobody_has_tokens)


def check_tensor_group(pairs_share_experts):
    """Two ranks with equal tokens, times two: as two ranks without tensor parallelism."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tokens = [7, 5]
    options = dict(
        shared_intermediate=6, balance_weight=0.3, z_weight=0.1, capacity_factor=1.1, gated=True, bias=True
    )
    whole = whole_layer(8, process_group=alone(), **options)
    outputs, gradients, parameters = expected_of(whole, tokens)
    group = dist.group.WORLD if pairs_share_experts else across[rank % 2]
    layer = part_of(whole, process_group=group, tensor_group=pairs[rank // 2], costs=COSTS)
    number = dist.get_world_size(group)
    for seed in range(3):
        layer.place(random_placement(8, number, seed))
        layer.zero_grad()
        x = inputs_of(rank // 2, tokens).requires_grad_()
        y = layer(x)
        (y * targets_of(rank // 2, tokens)).sum().backward()
        torch.testing.assert_close(y, outputs[rank // 2], **EXACT)
        torch.testing.assert_close(x.grad, gradients[rank // 2], **EXACT)
        local, place = 8 // number, dist.get_rank(group)
        for name, parameter in layer.named_parameters():
            grad, expected = parameter.grad, parameters[name]
            if name.startswith("experts."):
                expected = expected[place * local : (place + 1) * local]
            else:
                dist.all_reduce(grad, group=across[rank % 2])
            torch.testing.assert_close(grad, expected, **EXACT)


@pytest.mark.parametrize("pairs_share_experts", [True, False])
def test_tensor_parallel_ranks_take_shares_of_the_tokens(four_ranks, pairs_share_experts):
    four_ranks.run(check_tensor_group, pairs_share_experts)


def check_replicas():
    """Two groups of two ranks, gradients averaged over all as DistributedDataParallel does."""
    rank, tokens = dist.get_rank(), [6, 6, 6, 6]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    whole = whole_layer(4, process_group=alone(), bias_update_rate=0.01)
    _, _, parameters = expected_of(whole, tokens)
    layer = part_of(whole, process_group=groups[rank // 2], load_group=dist.group.WORLD, costs=COSTS)
    x = inputs_of(rank, tokens)
    for _ in range(2):
        layer.zero_grad()
        (layer(x) * targets_of(rank, tokens)).sum().backward()
        if layer._placement_state.number == 1:
            for name, parameter in layer.named_parameters():
                grad, expected = parameter.grad, parameters[name] / 4
                if name.startswith("experts."):
                    dist.all_reduce(grad, group=replicas[rank % 2])
                    first = rank % 2 * 2
                    expected = expected[first : first + 2]
                else:
                    dist.all_reduce(grad)
                torch.testing.assert_close(grad / 4, expected, **EXACT)
    biases = [torch.empty(4) for _ in range(4)]
    dist.all_gather(biases, layer.router.bias)
    assert layer.router.bias.any()
    assert all(torch.equal(bias, biases[0]) for bias in biases)


def test_replicas_average(four_ranks):
    four_ranks.run(check_replicas)


def check_measured():
    torch.manual_seed(dist.get_rank())
    layer = OverlappedMoE(HIDDEN, WIDTH, 4, gated=True, shared_intermediate=8)
    for _ in range(3):
        layer(torch.randn(2, 16, HIDDEN, requires_grad=True)).sum().backward()
    layer.eval()
    layer(torch.randn(2, 16, HIDDEN))
    last = layer.last
    costs = dataclasses.asdict(layer._placement_state.costs)
    weights = torch.cat([p.detach().flatten() for p in (layer.router.weight, *layer.shared.parameters())])
    report = [row.where for row in oases.report().others]
    return costs, weights, last.counts.tolist(), last.token_bytes, report


def test_costs_are_measured(two_ranks):
    (costs, weights, counts, sent, report), (others, alike, *_) = two_ranks.run(check_measured)
    assert costs == others
    assert torch.equal(weights, alike)
    assert costs["token_seconds"] > 0
    assert costs["bandwidth"] > 0
    assert costs["expert_bytes"] == 4 * (2 * WIDTH * HIDDEN + HIDDEN * WIDTH)
    assert np.sum(counts) == 2 * 2 * 32
    assert sent > 0
    assert "dispatch of MoE layer" in report
    assert "dispatch of MoE layer, gradients" in report


def check_whole_state(path):
    whole = whole_layer(4, process_group=alone(), gated=True, bias=True, shared_intermediate=4, bias_update_rate=0.1)
    layer = part_of(whole)
    state = oases.full_state_dict(layer)
    torch.manual_seed(3)
    drawn = oases.full_state_dict(OverlappedMoE(HIDDEN, WIDTH, 4))
    torch.manual_seed(3)
    alike = OverlappedMoE(HIDDEN, WIDTH, 4, process_group=alone()).state_dict()
    if dist.get_rank() == 0:
        for found, expected in ((state, whole.state_dict()), (drawn, alike)):
            assert list(found) == list(expected)
            for name in found:
                assert torch.equal(found[name], expected[name]), name


def test_the_gathered_state_is_that_of_one_process(two_ranks):
    two_ranks.run(check_whole_state, "")


def test_a_group_of_one_needs_no_process_group():
    for options in OPTIONS.values():
        layer = whole_layer(4, **options)
        outputs, gradients, parameters = expected_of(layer, [13])
        layer.zero_grad()
        x = inputs_of(0, [13]).requires_grad_()
        y = layer(x)
        (y * targets_of(0, [13])).sum().backward()
        torch.testing.assert_close(y, outputs[0], **EXACT)
        torch.testing.assert_close(x.grad, gradients[0], **EXACT)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, parameters[name], **EXACT)
        assert layer.last.token_bytes == layer.last.expert_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_and_autocast(dtype):
    layer = whole_layer(4, gated=True, shared_intermediate=8, bias_update_rate=0.1)
    x = inputs_of(0, [40])
    with torch.no_grad():
        layer.router.weight.copy_(layer.router.weight.to(dtype))
        x = x.to(dtype).double()
        expected = layer.eval()(x)
    layer.to(dtype)
    assert layer.router.bias.dtype is torch.float32
    y = layer(x.to(dtype))
    assert y.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    if dtype is torch.float32:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer.train()(x.to(dtype))
        assert y.dtype is torch.bfloat16
        y.sum().backward()
        assert layer.experts.up.grad.dtype is torch.float32
        torch.testing.assert_close(y.double(), expected, rtol=5e-2, atol=5e-2)


def test_public_name():
    assert oases.OverlappedMoE is OverlappedMoE
    assert json.dumps(sorted(oases.__all__))
