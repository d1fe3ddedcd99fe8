"""The Triton twins beside the native kernels: masks bit by bit, results and gradients to a few roundings.

On the CPU they run under Triton's interpreter (see python_tests/conftest.py).
"""

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed: pip install triton")

from oases import kernels
from oases.kernels import activation_triton, norm_triton

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def compare(native, twin, tensors):
    outputs = []
    for function in (native, twin):
        results = function(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        torch.manual_seed(1)
        grads = [torch.randn(result.shape).to(result) for result in results]
        outputs.append([*results, *torch.autograd.grad(results, tensors, grads)])
    for a, e in zip(*outputs, strict=True):
        error = (a.double() - e.double()).abs().max().item()
        assert error <= TOLERANCE[a.dtype] * max(1.0, e.abs().max().item())


def drawn(device, dtype, *shapes):
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("n", [5, 64, 200])
def test_norm(device, n, p, kind, dtype):
    def of(module):
        return lambda y, x, bias, weight, norm_bias: module.bias_dropout_residual_norm(
            y, x, bias=bias, weight=weight, norm_bias=norm_bias, p=p, seed=2**40 + 3, offset=7, kind=kind
        )

    compare(of(kernels), of(norm_triton), drawn(device, dtype, (3, 2, n), (3, 2, n), n, n, n))


def test_masks_are_the_same(device):
    ones, zeros = torch.ones(9, 70, device=device), torch.zeros(9, 70, device=device)
    masks = [
        module.bias_dropout_residual_norm(ones, zeros, weight=ones[0], p=0.3, seed=2**50 + 1, offset=2**34)[0]
        for module in (kernels, norm_triton)
    ]
    assert torch.equal(*masks)


def test_rows_too_long(device):
    x = torch.zeros(1, 65537, device=device)
    with pytest.raises(ValueError, match="rows of 65537 numbers"):
        norm_triton.bias_dropout_residual_norm(x, x, weight=x[0])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("n", [6, 1030])
def test_activations(device, n, dtype):
    for approximate in ("tanh", "none"):
        tensors = drawn(device, dtype, (4, n), n)
        compare(
            lambda x, b, how=approximate: kernels.bias_gelu(x, b, how),
            lambda x, b, how=approximate: activation_triton.bias_gelu(x, b, how), tensors,
        )  # fmt: skip
    compare(kernels.bias_gelu, activation_triton.bias_gelu, drawn(device, dtype, (4, n)))
    compare(kernels.swiglu, activation_triton.swiglu, drawn(device, dtype, (4, n)))
