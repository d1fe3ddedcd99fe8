"""Exceptions outside of stacks on one rank: told to the ranks that would wait for it, and raised from then on."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from autotp.plain_models import ROWS, Plain, made, spec, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases import OverlappedColumnLinear, OverlappedEmbedding, OverlappedMoE, OverlappedRowLinear
from oases.core.execution.failure import FailedRankError, has_failed
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.replicas import average_replicas

KINDS = [ValueError, KeyboardInterrupt, SystemExit]


class Trap:
    """A hook that raises while it is set, on rank 1 alone."""

    def __init__(self, kind):
        self.kind, self.set = kind, False

    def __call__(self, *_):
        if self.set and dist.get_rank() == 1:
            raise self.kind("trapped")


def repeat(step, steps):
    for _ in range(steps):
        step()


def compare(step, trap, steps=1, told="an exception in a hook"):
    """A step fails on rank 1 by the trap; rank 0 hears of it in one of `steps`."""
    step()
    dist.barrier()
    trap.set = True
    if dist.get_rank() == 1:
        with pytest.raises(trap.kind, match="trapped"):
            step()
    else:
        # A collective outside of a stack raises the scheduler's error.
        with pytest.raises(RuntimeError, match=rf"rank 1 (failed|ran out of memory) at .*{told}"):
            repeat(step, steps)
    assert has_failed()


def stepping(module, loss):
    """A step's gradients."""

    def step():
        module.zero_grad()
        loss().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    return step


def replicas():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def check_replicas(kind, layer, after_accumulation):
    module, trap = replicas(), Trap(kind)
    average_replicas(module, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))
    weight = module[layer].weight
    (weight.register_post_accumulate_grad_hook if after_accumulation else weight.register_hook)(trap)
    x = torch.ones(3, 4, dtype=torch.float64)
    compare(stepping(module, lambda: module(x).square().sum()), trap, steps=2)  # hooks run behind the average


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_before_the_first_gradient_of_replicas(two_ranks, kind):
    two_ranks.run(check_replicas, kind, 2, False)


def test_a_hook_after_the_last_gradient_of_replicas(two_ranks):
    two_ranks.run(check_replicas, ValueError, 0, True)


def check_replicas_forward():
    module, trap = replicas(), Trap(ValueError)
    average_replicas(module, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))
    module[1].register_forward_hook(trap)
    x = torch.ones(3, 4, dtype=torch.float64)
    try:
        raise KeyError("handled by the caller")
    except KeyError:  # is not the step's
        compare(stepping(module, lambda: module(x).square().sum()), trap, told="Sequential: ValueError: trapped")


def test_a_forward_hook_of_replicas(two_ranks):
    two_ranks.run(check_replicas_forward)


def check_averager(kind):
    module, trap = replicas(), Trap(kind)
    average = GradientAverager([(module.parameters(), dist.group.WORLD)])
    module[0].weight.register_hook(trap)
    x = torch.ones(3, 4, dtype=torch.float64)

    def step():
        module.zero_grad()
        with average.overlapped():
            module(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    compare(step, trap, told=f"the average of gradients: {kind.__name__}: trapped")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_in_an_overlapped_average(two_ranks, kind):
    two_ranks.run(check_averager, kind)


def check_averager_at_the_end():
    """Rank 1 has no memory for the last bucket, which is sent after the backward pass."""
    module, trap = replicas(), Trap(MemoryError)
    average = GradientAverager([(module.parameters(), dist.group.WORLD)])
    bucket = average._lanes[0].buckets[-1]
    flat = bucket.flat

    def short_of_memory(wire):
        trap()
        return flat(wire)

    bucket.flat = short_of_memory
    x = torch.ones(3, 4, dtype=torch.float64)

    def step():
        module.zero_grad()
        with average.overlapped():
            module[2](x).square().sum().backward()  # the first layer has no gradient
        return [parameter.grad.clone() for parameter in module[2].parameters()]

    compare(step, trap, told="the average of gradients: MemoryError: trapped")


def test_an_average_that_fails_after_the_backward_pass(two_ranks):
    two_ranks.run(check_averager_at_the_end)


HOOKS = {
    "the head's result": (lambda model, trap: model.head.register_forward_hook(trap), "Plain: ValueError: trapped"),
    "the table's result": (lambda model, trap: model.table.register_forward_hook(trap), "Plain: ValueError: trapped"),
    "the head's weight": (lambda model, trap: model.head.weight.register_hook(trap), "an exception in a hook"),
    "the head's input": (lambda model, trap: model.head.register_full_backward_hook(trap), "an exception in a hook"),
    "the table's weight": (
        lambda model, trap: model.table.weight.register_post_accumulate_grad_hook(trap), "an exception in a hook",
    ),
}  # fmt: skip


def check_model(where):
    model = oases.parallelize(made(Plain), spec=spec())
    hook, told = HOOKS[where]
    hook(model, trap := Trap(ValueError))
    x = tokens()

    def loss():
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    compare(stepping(model, loss), trap, 2, told)  # the table's gradient is the last: after it nobody waits


@pytest.mark.long
@pytest.mark.parametrize("where", HOOKS)
def test_hooks_of_a_models_head_and_table(two_ranks, where):
    two_ranks.run(check_model, where)


class Layers(nn.Module):
    """Drop-in layers without a stack."""

    def __init__(self):
        super().__init__()
        self.table = OverlappedEmbedding(ROWS, 8, dtype=torch.float64)
        self.up = OverlappedColumnLinear(8, 16, dtype=torch.float64)
        self.down = OverlappedRowLinear(16, 8, dtype=torch.float64)
        self.head = nn.Linear(8, ROWS // 2, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.down(self.up(self.table(x)).relu()))


def check_layers(name):
    torch.manual_seed(3)
    module, x, trap = Layers(), tokens(), Trap(KeyboardInterrupt)
    module.get_parameter(name).register_hook(trap)
    compare(stepping(module, lambda: oases.parallel_cross_entropy(module(x), x)), trap, 2)


@pytest.mark.parametrize("name", ["head.weight", "down.weight", "up.weight", "table.weight"])
def test_hooks_of_layers_and_of_the_loss(two_ranks, name):
    two_ranks.run(check_layers, name)


def check_mixture(kind, name):
    torch.manual_seed(3)
    layer = OverlappedMoE(8, 16, 4, placement="none", dtype=torch.float64)
    layer.get_parameter(name).register_hook(trap := Trap(kind))
    x = torch.randn(6, 8, dtype=torch.float64)
    compare(stepping(layer, lambda: layer(x.clone().requires_grad_()).square().sum()), trap, 2)


@pytest.mark.parametrize(("kind", "name"), [(ValueError, "router.weight"), (SystemExit, "experts.down")])
def test_hooks_of_a_mixture_of_experts(two_ranks, kind, name):
    two_ranks.run(check_mixture, kind, name)


def check_refused():
    """Check that what all ranks refuse has its own error on each."""
    model, x = oases.parallelize(made(Plain), spec=spec()), tokens()
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), x.flatten())
    (first, *_) = model.parameters()
    with pytest.raises(RuntimeError, match=r"differentiation|derivatives") as caught:
        torch.autograd.grad(loss, [first], create_graph=True)
    assert not isinstance(caught.value, FailedRankError)


@pytest.mark.long
def test_second_derivatives_are_refused_on_each_rank_alone(two_ranks):
    two_ranks.run(check_refused)
