"""Failures of one rank on the virtual device, where others run ahead of it."""

import device
import pytest
import torch
import torch.distributed as dist
from virtual_stacks import LAYERS, given, make_stack, on, step

from oases.core.execution.failure import FailedRankError


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of luck")


def raises(h):
    raise RuntimeError("out of luck")


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("block", range(2 * LAYERS))
def test_a_failed_op_is_raised_on_all_ranks_and_no_stream_waits_for_ever(two_virtual, block, where):
    check_failure(two_virtual, block, where, 0)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failures_under_random_delays(two_virtual, where):
    for seed in range(1, 51):
        check_failure(two_virtual, seed % (2 * LAYERS), where, seed)


def check_failure(ranks, block, where, seed):
    said = ranks.run(fails_in_a_step, block, where, seed)
    assert said[1] == "raised", "the rank that failed"


def fails_in_a_step(number, where, seed):
    """Whether the step raised, or the next one."""
    module, place = device.take()
    module.set_delays(2e-3 if seed else 0.0, seed)
    stack, (x, grad) = make_stack(place), on(place, given())
    step(stack, x, grad)
    torch.accelerator.synchronize()
    block = stack.blocks[number]
    product = block.product
    if dist.get_rank() == 1:
        block.product = (lambda h: product(Failing.apply(h))) if where == "backward" else raises
    said = "returned"
    try:
        stack(x.detach().requires_grad_()).backward(grad)
    except FailedRankError:
        said = "raised"
    torch.accelerator.synchronize()
    with pytest.raises(FailedRankError, match="out of luck"):  # also where it had returned from its call
        step(stack, x, grad)
    return said


def test_confirm_tells_of_a_failure_before_the_optimizer_step(two_virtual):
    two_virtual.run(confirms)


class FailingLate(torch.autograd.Function):
    """Fail once the other rank's backward() has returned."""

    @staticmethod
    def forward(ctx, x, store):
        ctx.store = store
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.store.wait(["backward has returned"])
        raise RuntimeError("out of luck")


def confirms():
    _, place = device.take()
    store = dist.distributed_c10d._get_default_store()
    stack, (x, grad) = make_stack(place), on(place, given())
    for _ in range(2):
        step(stack, x, grad)
        stack.confirm()
    block = stack.blocks[0]
    product = block.product
    if dist.get_rank() == 1:
        block.product = lambda h: product(FailingLate.apply(h, store))
        with pytest.raises(FailedRankError, match="out of luck"):
            step(stack, x, grad)
    else:
        step(stack, x, grad)
        store.set("backward has returned", "1")
        with pytest.raises(FailedRankError, match="out of luck"):
            stack.confirm()
