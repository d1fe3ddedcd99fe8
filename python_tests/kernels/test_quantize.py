"""Kernels of quantised numbers: what the bytes say, sums of parts, and one result on every device."""

import pytest
import torch

from oases.extension import QUANTIZED_BLOCK, quantized_bytes
from oases.kernels.quantized import dequantize, dequantize_sum, quantize

SIZES = (1, 127, 128, 1000, 1536)
FACTORS = (1.0, 1e-41, 7e-45, 0.0, 3e30, 1e-31)
"""Factors of blocks of usual numbers: denormal, the least, zero, large, below what has a reciprocal."""
SINGLE = (-3.4e38, torch.nan, -torch.inf)


def numbers(n, seed=0):
    """Another kind of numbers in each block: scaled, or with one that is an outlier or no number."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(1000 * seed + n))
    for number, block in enumerate(x.split(QUANTIZED_BLOCK), seed):
        kind = number % (len(FACTORS) + len(SINGLE))
        if kind < len(FACTORS):
            block *= FACTORS[kind]
        else:
            block[len(block) // 2] = SINGLE[kind - len(FACTORS)]
    return x


def is_bad(x):
    """Whether each number is in a block with one that is not finite."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % QUANTIZED_BLOCK)).view(-1, QUANTIZED_BLOCK)
    return (~padded.isfinite()).any(1, keepdim=True).expand_as(padded).flatten()[: len(x)]


def on(x, device, shift=0):
    """x there, `shift` numbers behind the start of its memory: kernels move 16 bytes at a time, or fewer."""
    room = torch.zeros(len(x) + shift, dtype=x.dtype, device=device)
    room[shift:] = x.to(device)
    return room[shift:]


def same(x, y):
    """Whether all bits are equal, but those of NaN."""
    return torch.equal(x.cpu().nan_to_num(1.5e7).view(torch.uint8), y.cpu().nan_to_num(1.5e7).view(torch.uint8))


@pytest.mark.parametrize("shift", [0, 1])
def test_every_device_gives_the_same_bytes(device, shift):
    for n in SIZES:
        x = numbers(n)
        packed = quantize(x)
        found = quantize(on(x, device, shift))
        assert torch.equal(found.cpu(), packed), n
        assert len(packed) == quantized_bytes(n)
        back = dequantize(on(packed, device, 4 * shift), n)
        assert same(back, dequantize(packed, n))
        parts = torch.stack([quantize(numbers(n, seed)) for seed in (1, 2, 3)])
        summed = dequantize_sum(on(x, device, shift), parts.to(device))
        assert same(summed, dequantize_sum(x, parts))
        again = quantize(on(x, device, shift), parts.to(device))
        assert torch.equal(again.cpu(), quantize(x, parts))


def test_a_sum_is_that_of_its_parts(device):
    for n in SIZES:
        x, parts = numbers(n), [quantize(numbers(n, seed)) for seed in (1, 2, 3)]
        expected = x.clone()
        for part in parts:
            expected += dequantize(part, n)
        rows = torch.stack(parts).to(device)
        summed = dequantize_sum(x.to(device), rows)
        assert same(summed, expected)
        assert torch.equal(quantize(x.to(device), rows).cpu(), quantize(summed).cpu())
        room = torch.empty(quantized_bytes(n), dtype=torch.uint8, device=device)
        torch.ops.oases.quantize(x.to(device), rows, 1, room)
        assert torch.equal(room, quantize(x.to(device), rows[[0, 2]])), "all but part 1"


def test_codes_and_scales(device):
    """Decode the bytes as their reader would."""
    for n in SIZES:
        x = numbers(n)
        packed, blocks = quantize(x.to(device)).cpu(), -(-n // QUANTIZED_BLOCK)
        scales = packed[-4 * blocks :].view(torch.float32)
        values = packed[: -4 * blocks].view(torch.int8).float().view(blocks, -1)
        decoded = (values * scales[:, None]).flatten()[:n]
        assert same(dequantize(packed.to(device), n), decoded)
        assert torch.equal(decoded.isnan(), is_bad(x))
        good = x[~is_bad(x)].double()
        most = torch.nn.functional.pad(x, (0, -n % QUANTIZED_BLOCK)).view(blocks, -1).abs().amax(1, keepdim=True)
        step = (most / 127).expand(-1, QUANTIZED_BLOCK).flatten()[:n][~is_bad(x)]
        error = (decoded[~is_bad(x)].double() - good).abs()
        assert (error <= step.double() / 2 * (1 + 1e-5) + 127 * 2.0**-149).all()


def test_bytes_of_known_numbers(device):
    """Codes and scales that packed messages of any version hold."""
    x = torch.arange(-64, 66).float() / 16
    packed = quantize(x.to(device)).cpu()
    assert packed[-8:].view(torch.float32).tolist() == [float(torch.tensor(4.0) / 127), float(x[-1] / 127)]
    assert packed[:5].view(torch.int8).tolist() == [-127, -125, -123, -121, -119]
    assert packed[126:131].view(torch.int8).tolist() == [123, 125, 125, 127, 0]


def test_bad_arguments(device):
    x = torch.ones(300, device=device)
    with pytest.raises(ValueError, match="contiguous float32 tensors, got Double"):
        quantize(x.cpu().double())
    with pytest.raises(ValueError, match="parts of 300 numbers are contiguous rows of 396 bytes"):
        quantize(x, torch.zeros(1, 3, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match="dequantize of 300 numbers takes 396 contiguous bytes, got 395 of Byte"):
        dequantize(torch.zeros(395, dtype=torch.uint8, device=device), 300)
