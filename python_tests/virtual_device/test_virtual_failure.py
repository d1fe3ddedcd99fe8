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
def test_a_failed_op_leaves_no_silently_wrong_gradient(two_virtual, block, where):
    check_failure(two_virtual, block, where, 0)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failures_under_random_delays(two_virtual, where):
    for seed in range(1, 51):
        check_failure(two_virtual, seed % (2 * LAYERS), where, seed)


def check_failure(ranks, block, where, seed):
    results = ranks.run(fails_in_a_step, block, where, seed)
    assert results[1][0] == "raised", "the rank that failed"
    for _, wrong in results:
        assert not wrong, "gradients that are neither right nor NaN"


def fails_in_a_step(number, where, seed):
    """Whether the step raised; gradients that are finite and wrong."""
    module, place = device.take()
    module.set_delays(2e-3 if seed else 0.0, seed)
    expected = step(make_stack("cpu"), *given())  # the group's monitor was made for tensors of the CPU
    stack, (x, grad) = make_stack(place), on(place, given())
    step(stack, x, grad)
    torch.accelerator.synchronize()
    stack.zero_grad()
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
    found = [parameter.grad for parameter in stack.parameters()]
    wrong = [
        at for at, (a, b) in enumerate(zip(found, expected[2:], strict=True))
        if a is not None and a.cpu().isfinite().all() and not torch.allclose(a.cpu(), b)
    ]  # fmt: skip
    with pytest.raises(FailedRankError, match="out of luck"):  # also where it had ended its call
        step(stack, x, grad)
    return said, wrong


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
