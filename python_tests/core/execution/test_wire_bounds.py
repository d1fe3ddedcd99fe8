"""Errors of quantised sums beside float64."""

import pytest
import torch
import torch.distributed as dist

from oases.core.execution.communication import add_wire
from oases.core.execution.group import scheduler_of
from oases.kernels.quantized import dequantize, quantize

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


def rounding_of(blocks):
    """Largest error of a number of each block. blocks: their largest numbers."""
    scale = torch.ceil(blocks / 127 / LEAST) * LEAST * (1 + 1e-6)
    return (scale + LEAST) / 2


def bound_of(x):
    """Largest error of a sum of [ranks, n] numbers: of one rounding of every rank's part, and of the sum's."""
    n = x.shape[1]
    padded = torch.nn.functional.pad(x.double(), (0, -n % 128)).unflatten(1, (-1, 128))
    first = rounding_of(padded.abs().amax(2)).sum(0)
    total = first + rounding_of(padded.sum(0).abs().amax(1) + first)
    in_float = padded.abs().amax(2).sum(0) * len(x) * 2.0**-23  # of the sums in float32
    return (total + in_float).repeat_interleave(128)[:n]


def check_errors():
    size = dist.get_world_size()
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD)
    for kind in KINDS:
        for n in (1, 100, 128, 128 * size * 3, 4001, (1 << 20) + 77):
            x = numbers(kind, n, dist.get_rank())
            everyone = gathered(x)
            scheduler.wait(scheduler.all_reduce(x, f"{kind}, {n}", wire="int8"))
            same = gathered(x)
            assert all(torch.equal(same[0], each) for each in same), (kind, n)
            error = (x.double() - everyone.double().sum(0)).abs()
            assert bool((error <= bound_of(everyone)).all()), (kind, n, float(error.max()))


def test_sums_are_within_the_bounds_of_their_scales_and_equal_on_all_ranks(two_ranks):
    two_ranks.run(check_errors)


@pytest.mark.long
def test_four_ranks(four_ranks):
    four_ranks.run(check_errors)


def test_numbers_up_to_the_largest_stay_finite():
    most = torch.finfo(torch.float32).max
    x = torch.full((128,), most)
    x[::3] = -most
    for sent in (x, x.abs(), x * (torch.arange(128) == 5)):
        assert bool(dequantize(quantize(sent), 128).isfinite().all())
