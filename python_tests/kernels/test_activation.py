"""Bias + GELU and SwiGLU against float64 torch: results, gradients, and every mistake."""

import pytest
import torch
import torch.nn.functional as F

from oases.kernels import bias_gelu, swiglu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [(5, 1), (3, 7), (2, 3, 64), (70, 36), (3, 520), (2, 4097), (300, 24)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(actual, expected):
    error = (actual.double() - expected).abs().max().item()
    assert error <= TOLERANCE[actual.dtype] * max(1.0, expected.abs().max().item())


def compare(function, definition, *tensors):
    """Results and gradients of `function` beside those of `definition` in float64."""
    out = function(*tensors)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = definition(*doubles)
    close(out, expected)
    grad = torch.randn(out.shape).to(out)
    grads = torch.autograd.grad(out, tensors, grad)
    for a, e in zip(grads, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        close(a, e)


def drawn(*shape, device, dtype=torch.float32):
    return (2 * torch.randn(shape)).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu(device, shape, approximate, dtype):
    x, bias = drawn(*shape, device=device, dtype=dtype), drawn(shape[-1], device=device, dtype=dtype)
    compare(lambda x, b: bias_gelu(x, b, approximate), lambda x, b: F.gelu(x + b, approximate=approximate), x, bias)
    compare(lambda x: bias_gelu(x, None, approximate), lambda x: F.gelu(x, approximate=approximate), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu(device, shape, dtype):
    def definition(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    compare(swiglu, definition, drawn(*shape[:-1], 2 * shape[-1], device=device, dtype=dtype))
    gate, up = (drawn(*shape, device=device, dtype=dtype) for _ in range(2))
    compare(swiglu, lambda gate, up: F.silu(gate) * up, gate, up)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_far_from_zero_slopes_are_zero_and_one(device, approximate):
    x = torch.tensor([-3e38, -1e20, -50.0, 50.0, 1e20, 3e38], device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(bias_gelu(x, None, approximate).sum(), x)
    assert grad.tolist() == [0, 0, 0, 1, 1, 1]


def test_rows_far_apart_and_memory_that_is_not_aligned(device):
    x, bias = drawn(6, 32, device=device).detach(), drawn(32, device=device).detach()
    apart = torch.zeros(32, 6, device=device).t().copy_(x)
    shifted = torch.zeros(6 * 32 + 1, device=device)[1:].view(6, 32).copy_(x)
    for strange in (apart, shifted):
        torch.testing.assert_close(bias_gelu(strange, bias), bias_gelu(x, bias))
        torch.testing.assert_close(swiglu(strange), swiglu(x))
        torch.testing.assert_close(swiglu(strange, x), swiglu(x, x))
        torch.testing.assert_close(swiglu(x, strange), swiglu(x, x))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_empty(device, shape):
    x, bias = drawn(*shape, device=device), drawn(shape[-1], device=device)
    grads = torch.autograd.grad(bias_gelu(x, bias).sum(), (x, bias))
    assert [grad.shape for grad in grads] == [x.shape, bias.shape]
    assert not grads[1].any()
    assert swiglu(x).shape == (*shape[:-1], shape[-1] // 2)
    assert torch.autograd.grad(swiglu(x).sum(), x)[0].shape == shape
    assert torch.autograd.grad(swiglu(x, x).sum(), x)[0].shape == shape


def test_the_same_twice_and_on_any_number_of_threads(device):
    x, bias = drawn(3000, 40, device=device), drawn(40, device=device)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (threads, 1, 2):
            torch.set_num_threads(count)
            results.append(torch.autograd.grad(bias_gelu(x, bias).square().sum(), (x, bias)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (bias_gelu, (torch.zeros(2, 4), torch.zeros(3)), r"bias must have the shape \[4\], got \[3\]"),
        (bias_gelu, (torch.zeros(2, 4), torch.zeros(4).half()), "bias is Half but x is Float"),
        (bias_gelu, (torch.zeros(2, 4), None, "sigmoid"), "approximate must be 'tanh' or 'none', got 'sigmoid'"),
        (bias_gelu, (torch.zeros(2, 4).double(),), "bias_gelu: takes float32, float16 and bfloat16, got Double"),
        (bias_gelu, (torch.zeros(()),), "at least 1 dimension, got 0"),
        (swiglu, (torch.zeros(2, 5),), r"last dimension must be even, got the shape \[2, 5\]"),
        (swiglu, (torch.zeros(2, 4), torch.zeros(2, 2)), r"up must have the shape \[2, 4\], got \[2, 2\]"),
        (swiglu, (torch.zeros(2, 5), torch.zeros(2, 5).half()), "up is Half but x is Float"),
        (swiglu, (torch.zeros(2, 4, dtype=torch.int32),), "swiglu: takes float32, float16 and bfloat16, got Int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes(function, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        function(*arguments)


@pytest.mark.long
def test_opcheck(device):
    x, bias = drawn(4, 8, device=device), drawn(8, device=device)
    for b in (bias, None):
        torch.library.opcheck(torch.ops.oases.bias_gelu, (x, b, "tanh"))
        given = None if b is None else b.detach()
        torch.library.opcheck(torch.ops.oases.bias_gelu_backward, (x.detach(), x.detach(), given, "none"))
    torch.library.opcheck(torch.ops.oases.swiglu, (x,))
    torch.library.opcheck(torch.ops.oases.swiglu_backward, (x[:, :4].detach().clone(), x.detach()))
    torch.library.opcheck(torch.ops.oases.swiglu, (x, drawn(4, 8, device=device)))
    torch.library.opcheck(torch.ops.oases.swiglu_backward, tuple(x.detach().clone() for _ in range(3)))
