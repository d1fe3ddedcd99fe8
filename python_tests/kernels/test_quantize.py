"""Kernels of quantised numbers: what the bytes say, sums of parts, and one result on every device."""

import pytest
import torch

from oases.core.dtypes import QUANTISED
from oases.extension import QUANTIZED_BLOCK, quantized_bytes
from oases.kernels.quantized import dequantize, dequantize_sum, quantize

WIRES = [*QUANTISED, "bf16", "bf16:stochastic"]
LIMITS = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
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


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("shift", [0, 1])
def test_every_device_gives_the_same_bytes(device, wire, shift):
    for n in SIZES:
        x = numbers(n)
        packed = quantize(x, wire, 17)
        found = quantize(on(x, device, shift), wire, 17)
        assert torch.equal(found.cpu(), packed), n
        assert len(packed) == quantized_bytes(n, wire)
        back = dequantize(on(packed, device, 4 * shift), n, wire)
        assert same(back, dequantize(packed, n, wire))
        parts = torch.stack([quantize(numbers(n, seed), wire, seed) for seed in (1, 2, 3)])
        summed = dequantize_sum(on(x, device, shift), parts.to(device), wire)
        assert same(summed, dequantize_sum(x, parts, wire))
        again = quantize(on(x, device, shift), wire, 18, parts.to(device))
        assert torch.equal(again.cpu(), quantize(x, wire, 18, parts))


@pytest.mark.parametrize("wire", WIRES)
def test_a_sum_is_that_of_its_parts(device, wire):
    for n in SIZES:
        x, parts = numbers(n), [quantize(numbers(n, seed), wire, seed) for seed in (1, 2, 3)]
        expected = x.clone()
        for part in parts:
            expected += dequantize(part, n, wire)
        rows = torch.stack(parts).to(device)
        summed = dequantize_sum(x.to(device), rows, wire)
        assert same(summed, expected)
        assert torch.equal(quantize(x.to(device), wire, 5, rows).cpu(), quantize(summed, wire, 5).cpu())
        room = torch.empty(quantized_bytes(n, wire), dtype=torch.uint8, device=device)
        torch.ops.oases.quantize(x.to(device), wire, 5, rows, 1, 0, room)
        assert torch.equal(room, quantize(x.to(device), wire, 5, rows[[0, 2]])), "all but part 1"


@pytest.mark.parametrize("wire", [wire for wire in WIRES if "stochastic" not in wire and "rotated" not in wire])
def test_codes_and_scales(device, wire):
    """Decode the bytes as their reader would."""
    for n in SIZES:
        x = numbers(n)
        packed, blocks = quantize(x.to(device), wire).cpu(), -(-n // QUANTIZED_BLOCK)
        scales = packed[-4 * blocks :].view(torch.float32)
        codes = packed[: -4 * blocks]
        if wire == "bf16":
            values = codes.view(torch.bfloat16).float().view(blocks, -1)
            assert torch.equal(scales, torch.ones(blocks))
            assert torch.equal(values.flatten()[:n].nan_to_num(1.5), x.bfloat16().float().nan_to_num(1.5))
        elif wire == "int4":
            halves = codes.view(blocks, -1)
            low, high = halves & 15, halves >> 4
            values = torch.cat([low, high], 1).to(torch.int8)
            values = torch.where(values > 7, values - 16, values).float()
        else:
            values = codes.view(torch.int8 if wire == "int8" else torch.float8_e4m3fn).float().view(blocks, -1)
        decoded = (values * scales[:, None]).flatten()[:n]
        assert same(dequantize(packed.to(device), n, wire), decoded)
        if wire == "bf16":
            continue
        assert torch.equal(decoded.isnan(), is_bad(x))
        good = x[~is_bad(x)].double()
        most = torch.nn.functional.pad(x, (0, -n % QUANTIZED_BLOCK)).view(blocks, -1).abs().amax(1, keepdim=True)
        widest = 448 / 32 if wire == "fp8" else LIMITS[wire]  # e4m3's steps are 32 from 256 on
        step = (most / widest).expand(-1, QUANTIZED_BLOCK).flatten()[:n][~is_bad(x)]
        error = (decoded[~is_bad(x)].double() - good).abs()
        assert (error <= step.double() / 2 * (1 + 1e-5) + LIMITS[wire] * 2.0**-149).all()


@pytest.mark.parametrize("wire", ["int8:stochastic", "fp8:stochastic", "int4:rotated:stochastic", "bf16:stochastic"])
def test_rounding_at_random_depends_on_seed_and_place(device, wire):
    x = torch.full((256,), 0.3137)
    x[0] = x[128] = 1.0
    one, other = (quantize(x.to(device), wire, seed) for seed in (1, 2))
    assert torch.equal(one, quantize(x.to(device), wire, 1))
    assert not torch.equal(one, other)
    half = quantized_bytes(128, wire) - 4
    assert not torch.equal(one[:half], one[half : 2 * half])
    room = torch.empty_like(one)
    torch.ops.oases.quantize(x.to(device), wire, 1, None, -1, 128, room)
    assert torch.equal(room[:half], one[half : 2 * half]), "the second block alone"


def test_bad_arguments(device):
    x = torch.ones(300, device=device)
    with pytest.raises(ValueError, match="contiguous float32 tensors, got Double"):
        quantize(x.cpu().double(), "int8")
    with pytest.raises(ValueError, match="parts of 300 numbers are contiguous rows of 396 bytes"):
        quantize(x, "int8", parts=torch.zeros(1, 3, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match="dequantize of 300 numbers takes 396 contiguous bytes, got 395 of Byte"):
        dequantize(torch.zeros(395, dtype=torch.uint8, device=device), 300, "int8")
    with pytest.raises(ValueError, match="unknown type of numbers 'int9'; give int8, fp8 or int4"):
        torch.ops.oases.dequantize(torch.zeros(396, dtype=torch.uint8, device=device), "int9", x)
