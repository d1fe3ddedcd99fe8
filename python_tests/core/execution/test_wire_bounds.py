"""Errors of quantised sums beside float64, in every mode: codes, rotation, rounding to nearest or at random."""

import math

import pytest
import torch
import torch.distributed as dist

from oases.core.dtypes import QUANTISED
from oases.core.execution.communication import add_wire
from oases.core.execution.group import scheduler_of
from oases.kernels.quantized import dequantize, quantize

LIMITS = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
LEAST = 2.0**-149
KINDS = ("gaussian", "heavy-tailed", "outlier channels", "denormal", "least denormals", "one huge outlier", "zero")


def gathered(x):
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return torch.stack(found)


def numbers(kind, n, rank):
    generator = torch.Generator().manual_seed(100 * n + rank)
    x = torch.randn(n, generator=generator)
    if kind == "heavy-tailed":
        x *= torch.exp(3 * torch.randn(n, generator=generator))
    if kind == "outlier channels":
        x[::64] *= 1000
    if kind == "denormal":
        x *= 1e-41
    if kind == "least denormals":
        x *= 7e-45
    if kind == "one huge outlier":
        x[3 % n] = 3e38 * (1 - 2 * (rank % 2))
    if kind == "zero":
        x.zero_()
    return x


def rounding_of(blocks, wire):
    """Largest error of a number of each block, or with rotation the norm of all its errors. blocks: their sizes."""
    code = QUANTISED[wire]
    before = math.sqrt(128) / 32 if "rotated" in wire else 1.0  # see kBefore in csrc/quantize_cpu.cpp
    scale = torch.ceil(before * blocks / LIMITS[code] / LEAST) * LEAST * (1 + 1e-6)
    step = torch.minimum(32 * scale, torch.maximum(blocks / 8, scale / 512)) if code == "fp8" else scale
    error = step if "stochastic" in wire else step / 2
    return 32 * error + math.sqrt(128) * LEAST / 2 if "rotated" in wire else error + LEAST / 2


def bound_of(x, wire):
    """Largest error of a sum of [ranks, n] numbers: of one rounding of every rank's part, and of the sum's."""
    n = x.shape[1]
    padded = torch.nn.functional.pad(x.double(), (0, -n % 128)).unflatten(1, (-1, 128))
    size = torch.inf if "rotated" not in wire else 2
    first = rounding_of(torch.linalg.vector_norm(padded, size, 2), wire).sum(0)
    total = first + rounding_of(torch.linalg.vector_norm(padded.sum(0), size, 1) + first, wire)
    in_float = padded.abs().amax(2).sum(0) * len(x) * 2.0**-23  # of the sums in float32
    return (total + in_float).repeat_interleave(128)[:n]


def check_errors(wire, kinds):
    size = dist.get_world_size()
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD, wire)
    sizes = (1, 100, 128, 128 * size * 3, 4001, *([(1 << 20) + 77] if "gaussian" in kinds else []))
    for kind in kinds:
        for n in sizes:
            x = numbers(kind, n, dist.get_rank())
            everyone = gathered(x)
            scheduler.wait(scheduler.all_reduce(x, f"{kind}, {n}", wire=wire))
            same = gathered(x)
            assert all(torch.equal(same[0], each) for each in same), (kind, n)
            error = (x.double() - everyone.double().sum(0)).abs()
            assert bool((error <= bound_of(everyone, wire)).all()), (kind, n, float(error.max()))


@pytest.mark.long
@pytest.mark.few(4)
@pytest.mark.parametrize("wire", QUANTISED)
def test_sums_are_within_the_bounds_of_their_scales_and_equal_on_all_ranks(two_ranks, wire):
    two_ranks.run(check_errors, wire, KINDS)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("wire", ["int8", "int4:rotated:stochastic"])
def test_four_ranks(four_ranks, wire):
    four_ranks.run(check_errors, wire, KINDS)


def check_mean(wire, calls):
    """Mean over many sums of the same numbers, each rounded by another seed: the exact sum, within six deviations."""
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD, wire)
    x = numbers("gaussian", 256, dist.get_rank())
    exact = gathered(x).double().sum(0)
    total, squares = torch.zeros(2, 256, dtype=torch.float64)
    for _ in range(calls):
        y = x.clone()
        scheduler.wait(scheduler.all_reduce(y, "unbiased", wire=wire))
        error = y.double() - exact
        total += error
        squares += error.square()
    mean = total / calls
    deviation = (squares / calls - mean.square()).clamp_min(0).sqrt() / math.sqrt(calls)
    assert bool((mean.abs() <= 6 * deviation + 1e-6 * exact.abs().max()).all())
    assert float(deviation.max()) > 0
    assert "unbiased" not in scheduler.exempted()


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("wire", [wire for wire in QUANTISED if "stochastic" in wire])
def test_the_mean_of_sums_rounded_at_random_is_the_sum(two_ranks, wire):
    two_ranks.run(check_mean, wire, 1000)


def relative_error(x, wire):
    return float((dequantize(quantize(x, wire), x.numel(), wire) - x).norm() / x.norm())


@pytest.mark.parametrize("code", ["int8", "int4"])
def test_rotation_spreads_outliers(code):
    x = torch.randn(1 << 14)
    x[::128] *= 30
    assert relative_error(x, f"{code}:rotated") < relative_error(x, code) / 3


def test_numbers_up_to_the_largest_stay_finite():
    most = torch.finfo(torch.float32).max
    for wire in QUANTISED:
        x = torch.full((128,), most)
        x[::3] = -most
        for sent in (x, x.abs(), x * (torch.arange(128) == 5)):
            found = dequantize(quantize(sent, wire), 128, wire)
            assert bool(found.isfinite().all()), wire
