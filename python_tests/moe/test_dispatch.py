"""Counts, order and all-to-all of tokens, each against plain indexing."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe.moe_layers import random_placement

from oases.core.execution.group import scheduler_of
from oases.moe.dispatch import (
    AllToAll,
    RoutingError,
    by_token,
    dispatch_plan,
    permuted,
    reordered,
    start_counts,
    wire_bytes,
)
from oases.moe.experts import ExpertWeights
from oases.moe.forward import ExpertForward
from oases.moe.placement import owner_ranks
from oases.moe.router import Router

HIDDEN = 6
NONE = ExpertWeights(torch.empty(0), torch.empty(0))


def routing_of(rank, tokens, experts, top_k, capacity, dtype=torch.float64):
    torch.manual_seed(1)
    router = Router(HIDDEN, experts, top_k=top_k, capacity_factor=capacity, dtype=dtype)
    x = torch.randn(tokens, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(rank))
    return x.requires_grad_(), router(x)


@pytest.mark.parametrize("seed", range(6))
def test_itineraries_of_all_ranks_fit(seed):
    generator = np.random.default_rng(seed)
    devices = int(generator.integers(1, 5))
    experts = devices * int(generator.integers(1, 4))
    counts = generator.integers(0, 4, (experts, devices))
    placement = random_placement(experts, devices, seed)
    plans = [dispatch_plan(counts, placement, rank, torch.device("cpu")) for rank in range(devices)]
    for rank, plan in enumerate(plans):
        assert plan.received == [other.sent[rank] for other in plans]
        assert sum(plan.sent) == counts[:, rank].sum()
        assert plan.held[: plan.own] == np.flatnonzero(owner_ranks(experts, devices) == rank).tolist()
        assert plan.held[plan.own :] == [e for e in placement.moved if rank in placement.copies[e]]
        # What each source sends here, as (expert, source), in the order in which it sends.
        arriving = [
            (expert, source)
            for source, other in enumerate(plans)
            for expert in sorted(range(experts), key=other.positions.tolist().__getitem__)
            if placement.routes[expert, source] == rank
            for _ in range(counts[expert, source])
        ]
        wanted = sorted(arriving, key=lambda row: (plan.held.index(row[0]), row[1]))
        assert [arriving[i] for i in plan.order.tolist()] == wanted
        assert plan.rows == [sum(row[0] == expert for row in wanted) for expert in plan.held]
        back = torch.arange(len(arriving))[plan.order][plan.inverse]
        assert back.tolist() == list(range(len(arriving)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_permuted_and_combined_are_each_others_inverse(dtype, capacity, tokens):
    x, routing = routing_of(0, tokens, 4, 2, capacity, dtype)
    plan = dispatch_plan(routing.counts.numpy()[:, None], random_placement(4, 1, 0), 0, torch.device("cpu"))
    rows, source = permuted(x, routing, plan)
    assert len(rows) == routing.counts.sum()
    flat = routing.experts.flatten()
    assert flat[source[: len(rows)]].tolist() == sorted(flat[source[: len(rows)]].tolist())
    y = by_token(2 * rows, source, routing.weights)
    kept = torch.ones_like(routing.weights) if routing.kept is None else routing.kept
    expected = 2 * x * (routing.weights * kept).sum(1, keepdim=True).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def travel(tokens, experts, top_k, capacity, seed):
    """Experts that multiply by their number: to them and back, over real ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    x, routing = routing_of(rank, tokens[rank], experts, top_k, capacity)
    (demand,) = start_counts([routing], group)()
    assert demand.counts[:, rank].tolist() == routing.counts.tolist()
    assert demand.slots.tolist() == [top_k * number for number in tokens]
    assert (demand.dropped > 0) == (capacity is not None)
    placement = random_placement(experts, size, seed)
    scheduler = scheduler_of(group)
    scheduler.reset_totals()

    def numbered(rows, counts, weights):
        return rows * weights.up.repeat_interleave(torch.tensor(counts))[:, None]

    run, again = (
        ExpertForward(numbered, group, demand.counts, placement, x.device, label) for label in ("test", "again")
    )
    coming = run.dispatch.send(run.route(x, routing))
    own, copies = (
        ExpertWeights(torch.tensor(held) + 1.0, torch.empty(0))
        for held in (run.plan.held[: run.plan.own], run.plan.held[run.plan.own :])
    )
    rows = run.combine.send(run.compute(run.dispatch.receive(coming), own, copies=copies))
    other = again.dispatch.send(again.route(x.detach(), routing))  # while the results travel
    y = run.gather(run.combine.receive(rows), routing.weights)
    again.dispatch.receive(other)
    kept = 1 if routing.kept is None else routing.kept
    expected = x * (routing.weights * kept * (routing.experts + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, grad, retain_graph=True)[0],
        torch.autograd.grad(expected, x, grad)[0], rtol=0, atol=1e-12,
    )  # fmt: skip
    totals = scheduler.totals()
    for label in ("dispatch of test", "combine of test", "dispatch of test, gradients", "combine of test, gradients"):
        assert totals[label].count == 1
    assert totals["dispatch of test"].bytes == 8 * HIDDEN * sum(run.plan.sent)


@pytest.mark.parametrize("seed", range(3))
def test_to_the_experts_and_back(two_ranks, four_ranks, seed):
    two_ranks.run(travel, [13, 6], 4, 2, None, seed)
    four_ranks.run(travel, [9, 0, 21, 1], 8, 2, None, seed)
    four_ranks.run(travel, [16, 12, 21, 8], 4, 1, 0.4, seed)


def travel_on_a_wire(wire):
    """Errors of rows there and back, and of their gradients, over the largest entry; and bytes sent."""
    rank = dist.get_rank()
    x, routing = routing_of(rank, 40, 4, 2, None)
    x = x.detach().float().requires_grad_()
    counts = start_counts([routing], dist.group.WORLD)()[0].counts
    found = []
    for kind in (None, wire):
        scheduler_of(dist.group.WORLD).reset_totals()
        run = ExpertForward(
            lambda rows, *_: rows.sin(), dist.group.WORLD, counts, random_placement(4, 2, 0), x.device, "test", kind
        )
        rows = run.dispatch.receive(run.dispatch.send(run.route(x, routing)))
        rows = run.combine.send(run.compute(rows, NONE, copies=NONE))
        y = run.gather(run.combine.receive(rows), routing.weights)
        totals = scheduler_of(dist.group.WORLD).totals()
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert y.dtype == gradient.dtype == torch.float32
        found.append((y.detach(), gradient, totals["dispatch of test"].bytes))
    (y, gradient, plain), (other, approximate, fewer) = found
    apart = [float((a - b).abs().max() / a.abs().max()) for a, b in ((y, other), (gradient, approximate))]
    return apart, fewer / plain, run.plan.sent


@pytest.mark.parametrize(("wire", "most", "part"), [(torch.bfloat16, 0.02, 0.5), ("int8", 0.04, 0.3)])
def test_rows_and_gradients_on_a_wire(two_ranks, wire, most, part):
    for (result, gradient), fewer, _ in two_ranks.run(travel_on_a_wire, wire):
        assert 0 < result < most
        assert 0 < gradient < most
        assert fewer <= part


def test_bytes_of_numbers_on_a_wire():
    assert [wire_bytes(torch.float32, wire) for wire in (None, torch.bfloat16, "int8")] == [4, 2, 1 + 1 / 32]


def overlap():
    """Compute between send and receive comes between the collectives in the backward pass, too."""
    rank = dist.get_rank()
    order = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            order.append("between" if exchange._under_way is not None else "not between")
            return grad

    exchange = AllToAll(dist.group.WORLD, [1, 2 - rank], [1, 2 - (1 - rank)] if rank == 0 else [2, 1], "test")
    x = torch.randn(3 - rank, 4, requires_grad=True)
    pending = exchange.send(x)
    between = Noted.apply(x)
    y = exchange.receive(pending)
    (y.sum() + between.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))
    return order, len(y)


def test_the_backward_pass_overlaps_alike(two_ranks):
    assert two_ranks.run(overlap) == [(["between"], 2), (["between"], 3)]


def faulty(victims):
    rank = dist.get_rank()
    _, routing = routing_of(rank, 5, 4, 2, None)
    router = Router(HIDDEN, 4)
    if rank in victims:
        routing = router(torch.full((5, HIDDEN), float("nan")))
    with pytest.raises(RoutingError, match=f"not finite on rank {', '.join(map(str, victims))} of 4.*isfinite"):
        start_counts([routing], dist.group.WORLD, label="layers.7")()
    _, routing = routing_of(rank, 5, 4, 2, None)
    with pytest.raises(RoutingError, match=r"layers\.7: rank 2 has another layer, forward pass, mode or placement"):
        start_counts([routing], dist.group.WORLD, label="layers.7", state=rank // 2)()


def test_what_one_rank_finds_all_raise(four_ranks):
    four_ranks.run(faulty, [1, 3])


def test_groups_of_rows_and_back():
    counts = np.array([[2, 1], [0, 3]])
    plan = dispatch_plan(counts, random_placement(2, 2, 3), 1, torch.device("cpu"))
    rows = torch.randn(sum(plan.received), 3, requires_grad=True)
    back = reordered(reordered(rows, plan.order, plan.inverse), plan.inverse, plan.order)
    torch.testing.assert_close(back, rows)
    assert torch.autograd.gradcheck(lambda x: reordered(x, plan.order, plan.inverse), rows.double())


class Logged:
    """Scheduler of one rank that logs starts and waits."""

    def __init__(self):
        self.log = []

    def all_to_all(self, output, input, sent, received, label):
        output.copy_(input)
        self.log.append(f"start {label}")

    def wait(self, ticket):
        self.log.append("wait")


def test_tokens_and_their_gradients_are_in_flight_between_send_and_receive():
    exchange = AllToAll(None, [2], [2], "tokens")
    exchange._scheduler = scheduler = Logged()
    rows = torch.randn(2, 3, requires_grad=True)
    pending = exchange.send(rows)
    pending.register_hook(lambda _: scheduler.log.append("compute"))
    scheduler.log.append("compute")
    exchange.receive(pending).square().sum().backward()
    assert scheduler.log == ["start tokens", "compute", "wait", "start tokens, gradients", "compute", "wait"]
    torch.testing.assert_close(rows.grad, 2 * rows.detach())
