"""Groups by name, and what a GPU's group is made with."""

import pytest
import torch
import torch.distributed as dist

from oases import OverlappedStack
from oases.core.execution.group import group_name, group_of, nccl_options


def check_names():
    group = dist.group.WORLD
    assert group_of(group_name(group)) is group


def test_a_group_goes_by_its_name(two_ranks):
    two_ranks.run(check_names)
    assert group_of("") is None


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_no_nccl():
    with pytest.raises(RuntimeError, match="built without NCCL"):
        nccl_options()


@pytest.mark.gpu
def test_nccl_options():
    options = nccl_options(4)
    assert options.is_high_priority_stream
    assert options.config.max_ctas == 4


class Identity(torch.nn.Module):
    def partial(self, x):
        return 2 * x

    def combine(self, x, y):
        return x + y


@pytest.mark.gpu
def test_capture_is_refused():
    stack = OverlappedStack([Identity()])
    x = torch.randn(2, 3, device="cuda")
    with (
        pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        stack(x)
