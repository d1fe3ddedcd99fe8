"""Stacks, FSDP2, quantised sums, profiles and failures of ranks whose default group is `staged`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oases.layers import OverlappedStack
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.profile.config import ProfileConfig
from oases.profile.run import Surroundings, run_profile
from oases.simulator.hardware import Hardware
from oases.testing import RankPool

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def staged_ranks():
    with RankPool(2, "staged") as pool:
        yield pool


def stack(**options: object) -> tuple[OverlappedStack, torch.Tensor]:
    """A stack over the default group, and an input."""
    torch.manual_seed(0)
    blocks = transformer_blocks(GPTConfig(hidden=64, layers=2, heads=2, sequence=8), dist.group.WORLD)
    return OverlappedStack(blocks, schedule="oases", sub_batches=2, **options), torch.randn(4, 8, 64)


def quantised() -> tuple[str, list[float]]:
    """Backend of the ranks; the distance of outputs from the exact ones in standard deviations, by wire."""
    exact, x = stack()
    wanted = exact(x)
    found = []
    for code in ("int8", "bfloat16"):
        over, x = stack(wire_dtype=code)
        output = over(x)
        output.square().sum().backward()
        found.append(float((output - wanted).std() / wanted.std()))
    return dist.get_backend(), found


@pytest.mark.long
def test_sums_in_fewer_bits_go_over_it(staged_ranks):
    first, second = staged_ranks.run(quantised)
    assert first == second
    assert first[0] == "staged"
    assert all(0 < distance < 0.1 for distance in first[1])


def sharded() -> list[bool]:
    """Whether output and gradients under FSDP2 are those of the model alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    alone, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 8)
    outputs = [each(x) for each in (model, alone)]
    for output in outputs:
        output.sum().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [torch.equal(*outputs), *(torch.equal(one.grad.full_tensor(), other.grad) for one, other in pairs)]


def test_fsdp_shards_over_it(staged_ranks):
    assert staged_ranks.run(sharded) == [[True] * 5] * 2


def profiled() -> Hardware:
    return run_profile(ProfileConfig(64, 1, 2, 16, 1, iterations=1), Surroundings("over staged"), False)


@pytest.mark.long
def test_its_links_are_measured(staged_ranks):
    first, second = staged_ranks.run(profiled)
    assert first == second
    assert first.cluster.bytes_per_second > 0
    assert {sample.collective for sample in first.cluster.samples} >= {"all_reduce", "all_gather", "send"}


def failing() -> tuple[str, bool]:
    """First line of this rank's error when an op fails on rank 1."""
    over, x = stack()
    before = over(x)
    before.sum().backward()
    if dist.get_rank() == 1:

        def fail(*_: object) -> None:
            raise RuntimeError("planted")

        norms = [each for each in over.modules() if isinstance(each, nn.LayerNorm)]
        for each in norms[2:]:
            each.register_forward_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        over(x).sum().backward()
    return str(caught.value).splitlines()[0]


def test_a_failed_op_is_an_error_on_all_ranks(staged_ranks):
    for said in staged_ranks.run(failing):
        assert "rank 1" in said
        assert "planted" in said
