"""The norm epilogue against float64 torch: results, gradients, masks, and every mistake."""

import pytest
import torch

from oases.kernels import bias_dropout_residual_norm

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest number: a few roundings of the dtype."""
ROWS = [
    (5, 1),
    (3, 7),
    (2, 3, 64),
    (9, 129),
    (70, 512),
    (3, 520),
    (3, 1025),
    (2, 4096),
    (2, 8200),
    (1, 20000),
    (1, 20001),
]
"""Shapes on both sides of every choice of the launcher: warps and blocks, packs and scalars, held and read again."""


def close(actual, expected):
    error = (actual.double() - expected).abs().max().item()
    assert error <= TOLERANCE[actual.dtype] * max(1.0, expected.abs().max().item())


def drawn(shape, device, dtype, optional=True):
    """y, x, bias, weight, norm_bias, drawn on the CPU so that every device sees the same."""
    n = shape[-1]
    tensors = [torch.randn(shape), torch.randn(shape), torch.randn(n), torch.randn(n) + 1, torch.randn(n)]
    tensors = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    return tensors if optional else [*tensors[:2], None, tensors[3], None]


def fused(y, x, bias, weight, norm_bias, **options):
    return bias_dropout_residual_norm(y, x, bias=bias, weight=weight, norm_bias=norm_bias, **options)


def mask_of(shape, device, **options):
    """Dropout factors, read off a row of ones; float32."""
    zeros, ones = torch.zeros(shape, device=device), torch.ones(shape, device=device)
    return fused(ones, zeros, None, ones.new_ones(shape[-1]), None, **options)[0]


def reference(tensors, mask, kind, eps=1e-5):
    """The definition, in float64; returns (out, h, their gradients' leaves)."""
    leaves = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    y, x, bias, weight, norm_bias = leaves
    out = x + (y if bias is None else y + bias) * mask
    centred = out - out.mean(-1, keepdim=True) if kind == "layer" else out
    h = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return out, h if norm_bias is None else h + norm_bias, leaves


def compare(tensors, kind, p, uses=(True, True)):
    shape, device, dtype = tensors[0].shape, tensors[0].device, tensors[0].dtype
    options = {"p": p, "seed": 5, "offset": 3}
    out, h = fused(*tensors, kind=kind, **options)
    mask = mask_of(shape, device, **options).double()
    expected_out, expected_h, leaves = reference(tensors, mask, kind)
    close(out, expected_out)
    close(h, expected_h)
    weights = [torch.randn(shape).to(device, dtype) for _ in range(2)]
    given = [tensor for tensor in tensors if tensor is not None]
    pairs = [(a, w) for a, w, used in zip((out, h), weights, uses, strict=True) if used]
    actual = torch.autograd.grad([a for a, _ in pairs], given, [w for _, w in pairs], allow_unused=True)
    pairs = [(a, w.double()) for a, w, used in zip((expected_out, expected_h), weights, uses, strict=True) if used]
    wanted = [leaf for leaf in leaves if leaf is not None]
    expected = torch.autograd.grad([a for a, _ in pairs], wanted, [w for _, w in pairs], allow_unused=True)
    for a, e in zip(actual, expected, strict=True):
        close(a, torch.zeros_like(a).double() if e is None else e)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_against_float64(device, shape, kind):
    compare(drawn(shape, device, torch.float32), kind, p=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_half_precision(device, shape, dtype):
    # A row of one number has no spread: its layer norm divides a rounding by another.
    compare(drawn(shape, device, dtype), "rms" if shape[-1] == 1 else "layer", p=0.3)


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_nothing_and_everything_dropped(device, kind, p):
    compare(drawn((6, 24), device, torch.float32), kind, p)


@pytest.mark.parametrize("uses", [(True, False), (False, True)], ids=["out", "h"])
def test_one_result_unused(device, uses):
    compare(drawn((6, 24), device, torch.float32), "layer", 0.2, uses)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_without_biases(device, p):
    compare(drawn((6, 24), device, torch.float32, optional=False), "rms", p)


def test_against_torch(device):
    tensors = drawn((4, 96), device, torch.float32)
    y, x, bias, weight, norm_bias = tensors
    out, h = fused(*tensors)
    torch.testing.assert_close(out, x + y + bias)
    torch.testing.assert_close(h, torch.nn.functional.layer_norm(out, (96,), weight, norm_bias), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        fused(*tensors[:4], None, kind="rms", eps=1e-3)[1],
        torch.nn.functional.rms_norm(out, (96,), weight, 1e-3), atol=1e-5, rtol=1e-5,
    )  # fmt: skip


def philox(key, counter):
    words, key = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (second >> 32) ^ words[1] ^ key[0], second & 0xFFFFFFFF,
            (first >> 32) ^ words[3] ^ key[1], first & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


@pytest.mark.parametrize("n", [8, 10])
def test_the_mask_is_philox(device, n):
    # The known answer that the authors of Philox publish for a counter and key of zeros.
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    seed, offset, p = 2**40 + 7, 2**33, 0.25
    mask = mask_of((5, n), device, p=p, seed=seed, offset=offset)
    for row in range(5):
        for column in range(n):
            word = philox(seed, (offset + row) * ((n + 3) // 4) + column // 4)[column % 4]
            assert bool(mask[row, column]) == (word < round((1 - p) * 2**32))


def test_masks_keep_their_share(device):
    mask = mask_of((300, 1000), device, p=0.3, seed=1)
    kept = mask != 0
    # Five standard deviations of the mean of 300 000 draws; per column, of 300.
    assert abs(kept.double().mean().item() - 0.7) < 5 * (0.21 / 3e5) ** 0.5
    assert (kept.double().mean(0) - 0.7).abs().max().item() < 5 * (0.21 / 300) ** 0.5
    torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / 0.7))
    assert not torch.equal(kept, mask_of((300, 1000), device, p=0.3, seed=2) != 0)


def test_a_part_of_the_rows_draws_the_masks_of_the_whole(device):
    whole = mask_of((12, 20), device, p=0.5, seed=3)
    assert torch.equal(mask_of((5, 20), device, p=0.5, seed=3, offset=4), whole[4:9])
    assert torch.equal(mask_of((3, 4, 20), device, p=0.5, seed=3).view(12, 20), whole)


def test_backward_drops_what_forward_dropped(device):
    tensors = drawn((40, 50), device, torch.float32)
    out, _ = fused(*tensors, p=0.5, seed=11)
    (grad,) = torch.autograd.grad(out.sum(), tensors[0])
    assert torch.equal(grad, mask_of((40, 50), device, p=0.5, seed=11))


def test_rows_far_apart_and_copies_of_rows(device):
    plain = drawn((6, 24), device, torch.float32)
    y = torch.empty(24, 6, device=device).t().copy_(plain[0].detach())
    x = torch.zeros(6, 48, device=device)[:, ::2].copy_(plain[1].detach())
    for strange, expected in zip(fused(y, x, *plain[2:]), fused(*plain), strict=True):
        assert torch.equal(strange, expected)
    out, h = fused(*plain)
    # The gradient of a sum is one number that is repeated by strides of 0.
    expected = torch.autograd.grad([out, h], plain, [torch.ones_like(out), torch.ones_like(h)], retain_graph=True)
    for a, e in zip(torch.autograd.grad(out.sum() + h.sum(), plain), expected, strict=True):
        torch.testing.assert_close(a, e)


def test_memory_that_is_not_aligned(device):
    plain = drawn((3, 64), device, torch.bfloat16)
    shifted = [torch.empty(t.numel() + 1, device=device, dtype=t.dtype)[1:].view(t.shape) for t in plain]
    shifted = [to.copy_(t.detach()) for to, t in zip(shifted, plain, strict=True)]
    for a, e in zip(fused(*shifted, p=0.3, seed=4), fused(*plain, p=0.3, seed=4), strict=True):
        torch.testing.assert_close(a, e, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_empty(device, shape):
    tensors = drawn(shape, device, torch.float32)
    out, h = fused(*tensors, p=0.1)
    assert out.shape == h.shape == shape
    grads = torch.autograd.grad(out.sum() + h.sum(), tensors)
    assert all(grad.shape == tensor.shape and not grad.any() for grad, tensor in zip(grads, tensors, strict=True))


def test_the_same_twice_and_on_any_number_of_threads(device):
    tensors = drawn((700, 72), device, torch.float32)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (threads, 1, 2):
            torch.set_num_threads(count)
            out, h = fused(*tensors, p=0.2, seed=9)
            results.append([out, h, *torch.autograd.grad(out.sum() + h.square().sum(), tensors)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(4, 8, dtype=torch.float64)}, r"y is Double but x is Float"),
        ({"y": torch.zeros(4, 7)}, r"y must have the shape \[4, 8\], got \[4, 7\]"),
        ({"weight": torch.zeros(9)}, r"weight must have the shape \[8\], got \[9\]"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, r"weight is BFloat16 but x is Float"),
        ({"bias": torch.zeros(1, 8)}, r"bias must have the shape \[8\], got \[1, 8\]"),
        ({"norm_bias": torch.zeros(8, device="meta")}, r"norm_bias is on meta but x is on cpu"),
        ({"p": 1.5}, r"p must lie in \[0, 1\], got 1\.5"),
        ({"p": float("nan")}, r"p must lie in \[0, 1\], got nan"),
        ({"offset": -1}, r"offset must not be negative, got -1"),
        ({"kind": "batch"}, r"kind must be 'layer' or 'rms', got 'batch'"),
        ({"eps": -1.0}, r"eps must be finite and not negative, got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes(change, message):
    given = {"y": torch.zeros(4, 8), "x": torch.zeros(4, 8), "weight": torch.ones(8)} | change
    with pytest.raises(RuntimeError, match=message):
        bias_dropout_residual_norm(**given)


def test_a_dtype_that_has_no_kernel():
    x = torch.zeros(4, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="takes float32, float16 and bfloat16, got Double"):
        bias_dropout_residual_norm(x, x, weight=x[0])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_opcheck(device, kind):
    y, x, bias, weight, norm_bias = drawn((4, 8), device, torch.float32)
    op, backward = torch.ops.oases.bias_dropout_residual_norm, torch.ops.oases.bias_dropout_residual_norm_backward
    for p, b, nb in ((0.0, None, None), (0.3, bias, norm_bias)):
        torch.library.opcheck(op, (y, x, b, weight, nb, p, 1, 0, kind, 1e-5))
        out, h, mean, rstd = (t.detach() for t in op(y, x, b, weight, nb, p, 1, 0, kind, 1e-5))
        arguments = (out, h, out, weight.detach(), mean, rstd, b is not None, nb is not None, p, 1, 0, kind)
        torch.library.opcheck(backward, arguments)


def test_compile_fullgraph(device):
    tensors = drawn((4, 8), device, torch.float32)

    def loss(*tensors):
        out, h = fused(*tensors, p=0.3, seed=2)
        return out.square().sum() + h.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*tensors), tensors)
    for a, e in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
        torch.testing.assert_close(a, e)
