"""Norms and biases under sequence parallelism: each rank has seen a part of the tokens, so gradients are summed."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from oases.core.execution.group import scheduler_of
from oases.layers import OverlappedStack, sharded_parameters
from oases.models.gpt import GPTConfig, transformer_blocks

CONFIG = GPTConfig(hidden=16, layers=2, heads=4, sequence=8)


def stack_of(group, schedule, **options):
    return OverlappedStack(
        transformer_blocks(CONFIG, group), process_group=group, schedule=schedule, **options
    ).double()


def batch():
    return torch.randn(4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def gradients(stack, output):
    """Gradients of the replicated parameters."""
    stack.zero_grad()
    output.square().mean().backward()
    cut = {id(parameter) for _, parameter, _ in sharded_parameters(stack)}
    return {name: p.grad for name, p in stack.named_parameters() if id(p) not in cut}


class WithoutSums:
    """A group's scheduler that leaves out the sums of replicated gradients."""

    def __init__(self, scheduler):
        self._scheduler = scheduler

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def all_reduce(self, tensor, label=""):
        return None if label.startswith("replicated gradients") else self._scheduler.all_reduce(tensor, label)

    def wait(self, ticket):
        if ticket is not None:
            self._scheduler.wait(ticket)


def check_sums(schedule, recompute):
    group = dist.group.WORLD
    stack = stack_of(group, schedule, recompute=recompute, sequence_parallel=True)
    x = batch()
    summed = gradients(stack, stack(x))
    shares = gradients(stack, stack.run(x, WithoutSums(scheduler_of(group))))
    return summed, shares


@pytest.mark.parametrize(("schedule", "recompute"), [("sync", "none"), ("oases", "none"), ("oases", "full")])
def test_gradients_of_norms_and_biases_are_summed(two_ranks, schedule, recompute):
    plain = stack_of(None, "sync")
    expected = gradients(plain, plain(batch()))
    assert any("norm.weight" in name for name in expected)
    found = two_ranks.run(check_sums, schedule, recompute)
    for name, whole in expected.items():
        for summed, shares in found:
            torch.testing.assert_close(summed[name], whole, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
            assert not torch.allclose(shares[name], whole, rtol=1e-3), f"{name} needs no sum"
        parts = sum(shares[name] for _, shares in found)
        torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


class ScaledTwice(nn.Module):
    """Reads `scale` before the all-reduce, where its gradient is a partial sum, and after it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16, dtype=torch.float64))
        self.weight = torch.randn(16, 16, dtype=torch.float64)

    def partial(self, x):
        return F.linear(x * self.scale, self.weight / (dist.get_world_size() if dist.is_initialized() else 1))

    def combine(self, x, y):
        return x + y * self.scale


def check_read_twice(schedule):
    torch.manual_seed(0)
    stack = OverlappedStack([ScaledTwice() for _ in range(2)], schedule=schedule)
    x = batch()
    stack(x).square().mean().backward()
    return [block.scale.grad for block in stack.blocks]


@pytest.mark.parametrize("schedule", ["sync", "oases"])
def test_both_gradients_of_a_parameter_read_on_both_sides_count(two_ranks, schedule):
    torch.manual_seed(0)
    blocks = [ScaledTwice() for _ in range(2)]
    y = batch()
    for block in blocks:
        y = block.combine(y, block.partial(y))
    y.square().mean().backward()
    for found in two_ranks.run(check_read_twice, schedule):
        for mine, block in zip(found, blocks, strict=True):
            torch.testing.assert_close(mine, block.scale.grad, rtol=1e-10, atol=1e-13)
