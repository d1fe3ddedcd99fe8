"""The DTensor styles against torch's own: same parameters, outputs and gradients under every layout."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from oases import OverlappedColwiseParallel, OverlappedRowwiseParallel
from oases.core.execution.group import scheduler_of


def part(x, layout):
    return (
        x.chunk(dist.get_world_size(), layout.dim)[dist.get_rank()].clone()
        if isinstance(layout, Shard)
        else x.clone()
    )


def check_pair(outside, use_local_output):
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    whole, grad = torch.randn(2, 2, 4, 8)
    results = []
    for column, row in (
        (ColwiseParallel, RowwiseParallel),
        (OverlappedColwiseParallel, OverlappedRowwiseParallel),
    ):
        model = parallelize_module(
            copy.deepcopy(plain), mesh,
            {
                "0": column(input_layouts=outside),
                "2": row(output_layouts=outside, use_local_output=use_local_output),
            },
        )  # fmt: skip
        x = part(whole, outside).requires_grad_()
        scheduler_of(dist.group.WORLD).reset_totals()
        y = model(x)
        assert isinstance(y, DTensor) != use_local_output
        y = y if use_local_output else y.to_local()
        y.backward(part(grad, outside))
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters())
        results.append([y, x.grad, *(p.full_tensor() for p in model.parameters())])
        results[-1] += [p.grad.full_tensor() for p in model.parameters()]
    assert scheduler_of(dist.group.WORLD).totals(), "ours went over the scheduler"
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("use_local_output", [True, False])
@pytest.mark.parametrize("outside", [Replicate(), Shard(1), Shard(0)], ids=str)
def test_pair_equals_torch(two_ranks, outside, use_local_output):
    two_ranks.run(check_pair, outside, use_local_output)


def check_head():
    """A column-parallel output head that is gathered, and an embedding, which stays torch's."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    plain = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False))
    plan = {
        "0": OverlappedRowwiseParallel(input_layouts=Replicate()),
        "1": OverlappedColwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    tokens = torch.randint(8, (2, 5))
    expected, y = plain(tokens), model(tokens)
    torch.testing.assert_close(y, expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_gathered_head_and_embedding(two_ranks):
    two_ranks.run(check_head)


def both(outside, call):
    """Results of `call(model, whole)` and gradients with torch's styles, and with ours."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    results = []
    for column, row in (
        (ColwiseParallel, RowwiseParallel),
        (OverlappedColwiseParallel, OverlappedRowwiseParallel),
    ):
        styles = {"0": column(input_layouts=outside), "2": row(output_layouts=outside)}
        model = parallelize_module(copy.deepcopy(plain), mesh, styles)
        y = call(model, mesh)
        y.float().square().sum().backward()
        results.append([y, *(p.grad.full_tensor() for p in model.parameters())])
    return results


def check_autocast(activations, outside):
    x = part(torch.randn(2, 4, 8), outside).to(activations)

    def call(model, mesh):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    theirs, ours = both(outside, call)
    assert ours[0].dtype == theirs[0].dtype == torch.bfloat16
    for expected, got in zip(theirs, ours, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("outside", [Replicate(), Shard(1)], ids=str)
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_autocast_gives_torch_s_types(two_ranks, activations, outside):
    two_ranks.run(check_autocast, activations, outside)


def check_uneven():
    whole = torch.randn(2, 7, 8)

    def call(model, mesh):
        return model(distribute_tensor(whole, mesh, [Shard(1)]))

    for expected, got in zip(*both(Shard(1), call), strict=True):
        torch.testing.assert_close(got, expected)


def test_an_uneven_sequence(two_ranks):
    two_ranks.run(check_uneven)
