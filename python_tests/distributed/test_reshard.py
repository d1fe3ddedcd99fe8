"""Samples between replicas of different sizes: their order, and the weight their gradients have."""

import pytest
import torch
import torch.distributed as dist

from oases.distributed.mesh import Mesh
from oases.distributed.reshard import reshard

SAMPLES = 8


def share(x, mesh, degree):
    return x.chunk(mesh.replicas(degree))[mesh.replica(degree)]


def check_all_pairs(degrees):
    mesh = Mesh(degrees)
    whole = torch.arange(2.0 * SAMPLES, dtype=torch.float64).view(SAMPLES, 2)
    weight = torch.randn(SAMPLES, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for a in degrees:
        for b in degrees:
            x = share(whole, mesh, a).clone().requires_grad_()
            y = reshard(x, a, b, mesh)
            assert torch.equal(y, share(whole, mesh, b))
            # Each replica's loss is the mean over its samples, so the gradient of one is that of its own mean.
            (y * share(weight, mesh, b)).sum(1).mean().backward()
            expected = share(weight, mesh, a) / x.shape[0]
            torch.testing.assert_close(x.grad, expected, rtol=1e-15, atol=0.0)
    mesh.destroy()


def test_order_and_weight_of_samples(two_ranks, four_ranks):
    two_ranks.run(check_all_pairs, (1, 2))
    four_ranks.run(check_all_pairs, (1, 2, 4))


def check_there_and_back():
    """Degrees with a step between them, and gradients of whatever a chain computes."""
    mesh = Mesh([1, 2, 4])
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    leaf = x.clone().requires_grad_()
    y = leaf
    for a, b in ((1, 4), (4, 2), (2, 1)):
        y = reshard(y.tanh(), a, b, mesh)
    y.square().mean().backward()
    plain = x.clone().requires_grad_()
    z = plain.tanh().tanh().tanh()
    z.square().mean().backward()
    torch.testing.assert_close(y, z, rtol=1e-15, atol=0.0)
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-14, atol=0.0)
    assert reshard(y, 2, 2, mesh) is y
    with pytest.raises(ValueError, match="3 samples do not divide over 2 replicas of tp 2"):
        reshard(y.detach(), 4, 2, mesh)
    mesh.destroy()


def test_there_and_back(four_ranks):
    four_ranks.run(check_there_and_back)
