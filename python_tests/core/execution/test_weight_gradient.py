"""Linears whose weight gradients are deferred: both layouts of the weight against plain autograd."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oases import OverlappedStack
from oases.layers.weight_gradient import DeferredGradients, Leaves, deferring, linear


@contextmanager
def deferral(leaves):
    """Linears in here note the gradients of these stand-ins."""
    deferred = DeferredGradients(leaves)
    deferred.begin(False)
    token = deferring.set(deferred)
    yield deferred
    deferring.reset(token)


def operands(transposed):
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    weight = torch.randn(4, 6, dtype=torch.float64) if transposed else torch.randn(6, 4, dtype=torch.float64)
    return [each.requires_grad_() for each in (x, weight, torch.randn(6, dtype=torch.float64))]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_in_the_layout_of_the_weight(transposed, with_bias):
    x, weight, bias = operands(transposed)
    grads = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    expected = x @ (weight if transposed else weight.t()) + (bias if with_bias else 0)
    wanted = [x, weight, bias] if with_bias else [x, weight]
    x_grad, *gradients = torch.autograd.grad(expected, wanted, grads[0] + grads[1])
    leaves = Leaves([parameter.detach().requires_grad_() for parameter in wanted[1:]])
    weight, *biases = leaves.stand_ins
    bias = biases[0] if with_bias else None
    with deferral(leaves) as deferred:
        results = [linear(x, weight, bias, transposed=transposed) for _ in grads]
    torch.testing.assert_close(results[0], expected)
    found = [
        torch.autograd.grad(result, [x, weight], grad, allow_unused=True)
        for result, grad in zip(results, grads, strict=True)
    ]
    assert all(early is None for _, early in found), "the weight gradient is deferred"
    torch.testing.assert_close(found[0][0] + found[1][0], x_grad)
    deferred.compute()
    for found, gradient in zip(leaves.take(False), gradients, strict=True):
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("transposed", [False, True])
def test_under_autocast_it_is_deferred_too_and_all_have_autograd_s_types(transposed):
    x, weight, bias = (each.detach().float().requires_grad_() for each in operands(transposed))
    leaves = Leaves([weight, bias])
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, weight.t() if transposed else weight, bias)
        with deferral(leaves) as deferred:
            result = linear(x, *leaves.stand_ins, transposed=transposed)
    grad = torch.randn(3, 5, 6).bfloat16()
    x_grad, *gradients = torch.autograd.grad(expected, [x, weight, bias], grad)
    found, early = torch.autograd.grad(result, [x, leaves.stand_ins[0]], grad, allow_unused=True)
    assert early is None
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, x_grad, rtol=0, atol=0)
    deferred.compute()
    for mine, theirs in zip(leaves.take(False), gradients, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.05)  # sums of rows in bfloat16


def product_in_float(total, one, other, dtype, *, beta=1, alpha=1, out):
    """aten::addmm.dtype_out of the CPU, which has none."""
    assert total is out
    assert one.dtype == other.dtype == torch.bfloat16
    assert alpha == 1
    product = one.double() @ other.double()
    return out.copy_(product if beta == 0 else out.double() + product)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("exact", [True, False])
def test_products_of_16_bits_are_summed_in_float32_where_the_device_can(transposed, exact):
    torch.manual_seed(3)
    x, weight, _ = (each.detach().bfloat16().requires_grad_() for each in operands(transposed))
    weight.grad_dtype = torch.float32
    grads = torch.randn(2, 3, 5, 6).bfloat16()
    inputs = x.detach().double().flatten(0, 1)
    products = [grad.double().flatten(0, 1).t() @ inputs for grad in grads]
    expected = (products[0].float().double() + products[1]).float()
    leaves = Leaves([weight])
    with deferral(leaves) as deferred, torch.library._scoped_library("aten", "IMPL") as library:
        if exact:
            library.impl("addmm.dtype_out", product_in_float, "CPU")
        for grad in grads:
            torch.autograd.grad(linear(x, leaves.stand_ins[0], None, transposed=transposed), x, grad)
        deferred.compute()
    (found,) = leaves.take(False)
    assert found.dtype == torch.float32
    found = found.t() if transposed else found
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert torch.equal(found, expected) == exact, "rounded to 16 bits elsewhere"


@pytest.mark.parametrize("transposed", [False, True])
def test_outside_of_a_deferral_autograd_computes_it(transposed):
    x, weight, bias = operands(transposed)
    linear(x, weight, bias, transposed=transposed).sum().backward()
    assert weight.grad.shape == weight.shape
    torch.testing.assert_close(weight.grad.sum(), x.detach().sum() * 6)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_last_product_may_be_left_out(transposed):
    x, weight, bias = operands(transposed)
    leaves = Leaves([weight, bias])
    weight, bias = leaves.stand_ins
    with deferral(leaves) as deferred:
        first = linear(x, weight, bias, transposed=transposed)
        deferred.end(first)
        deferred.begin(True)
        skipped = linear(x, weight, bias, transposed=transposed)
        deferred.end()
    assert skipped.shape == first.shape
    assert skipped.untyped_storage().nbytes() == x.element_size(), "nobody computed it"
    grad = torch.randn_like(first)
    (mine,) = torch.autograd.grad(skipped, [x], grad)
    (expected,) = torch.autograd.grad(first, [x], grad)
    torch.testing.assert_close(mine, expected)


class Conv1D(nn.Module):
    """An MLP with weights [in, out], as GPT-2 has them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))

    def partial(self, x):
        return linear(F.gelu(linear(x, self.up, transposed=True)), self.down, transposed=True)

    def combine(self, x, y):
        return x + y


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["sync", "oases", "cross_pass"])
def test_transposed_weights_in_a_stack(schedule, recompute):
    stack = OverlappedStack([Conv1D(), Conv1D()], schedule=schedule, recompute=recompute)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    expected = x
    for block in stack.blocks:
        expected = expected + F.gelu(expected @ block.up) @ block.down
    parameters = list(stack.parameters())
    gradients = torch.autograd.grad(expected.square().sum(), parameters)
    stack(x).square().sum().backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
