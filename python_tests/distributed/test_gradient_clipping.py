"""Gradient norms over all ranks, by oases and by torch's own functions, against one process."""

import pytest
import torch
import torch.distributed as dist
from called_ops import CalledOps
from torch import nn

from oases import OverlappedColumnLinear, OverlappedRowLinear
from oases.distributed.gradient_clipping import clip_grad_norm
from oases.distributed.mesh import Mesh
from oases.errors import UsageError
from oases.layers.linear import shard


@pytest.fixture(params=["ours", "torch's"])
def clip(request):
    return (clip_grad_norm if request.param == "ours" else clipped_by_torch,)


def clipped_by_torch(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def check(clip_grad_norm):
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    plain = nn.Sequential(up, down)
    parallel = nn.Sequential(OverlappedColumnLinear.from_linear(up), OverlappedRowLinear.from_linear(down))
    x = torch.randn(5, 4)
    for model in (plain, parallel):
        (10 * model(x)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    norm = clip_grad_norm(parallel, 0.5)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(parallel[0].bias.grad, shard(up.bias.grad, 0, dist.group.WORLD))
    torch.testing.assert_close(parallel[1].bias.grad, down.bias.grad)


def check_replicas(clip_grad_norm):
    """Two replicas of two tensor-parallel ranks: each shard and each replicated gradient counts once."""
    mesh = Mesh([2])
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    group = mesh.tensor(2)
    parallel = nn.Sequential(
        OverlappedColumnLinear.from_linear(up, process_group=group),
        OverlappedRowLinear.from_linear(down, process_group=group),
    )
    x = torch.randn(5, 4)
    for model in (nn.Sequential(up, down), parallel):
        model(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_([*up.parameters(), *down.parameters()], 0.5)
    torch.testing.assert_close(clip_grad_norm(parallel, 0.5), expected)
    mesh.destroy()


def test_replicas_of_a_shard_count_once(four_ranks, clip):
    four_ranks.run(check_replicas, *clip)


def test_clipping_equals_one_process(two_ranks, four_ranks, clip):
    two_ranks.run(check, *clip)
    four_ranks.run(check, *clip)


def check_norms():
    """Norms of several orders by torch's functions; a norm of this rank alone is refused."""
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    plain = nn.Sequential(up, down)
    parallel = nn.Sequential(OverlappedColumnLinear.from_linear(up), OverlappedRowLinear.from_linear(down))
    for model in (plain, parallel):
        model(torch.ones(5, 4)).square().sum().backward()
    norm_of = nn.utils.get_total_norm
    for order in (1.0, 2.0, 3.0, float("inf")):
        theirs, mine = (norm_of([p.grad for p in model.parameters()], order) for model in (plain, parallel))
        torch.testing.assert_close(mine, theirs)
    nn.utils.clip_grads_with_norm_(parallel.parameters(), 1e9, mine)
    with pytest.raises(UsageError, match=r"a norm of this rank alone.*get_total_norm"):
        nn.utils.clip_grads_with_norm_(parallel.parameters(), 1.0, torch.ones(()))
    parallel[0].weight.grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0, error_if_nonfinite=True)


def test_norms_of_torch_are_over_all_ranks(two_ranks):
    two_ranks.run(check_norms)


def test_small_norms_stay():
    linear = nn.Linear(2, 2)
    linear.weight.grad = torch.full((2, 2), 0.1)
    assert float(clip_grad_norm(linear, 1.0)) == torch.tensor(0.2)
    assert torch.equal(linear.weight.grad, torch.full((2, 2), 0.1))
    assert float(clip_grad_norm(nn.Linear(2, 2), 1.0)) == 0


def test_the_number_of_ops_does_not_grow_with_the_number_of_gradients():
    counts = []
    for layers in (2, 40):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        for at, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + at)
        expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        with CalledOps() as called:
            norm = clip_grad_norm(model, 1.0)
        torch.testing.assert_close(norm, expected)
        counts.append(called.ops.total())
    assert counts[0] == counts[1] < 20


def test_gradients_of_several_dtypes_are_squared_in_float32_at_least():
    model = nn.Sequential(nn.Linear(64, 64).to(torch.bfloat16), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()]).norm()
    torch.testing.assert_close(clip_grad_norm(model, 1e9), expected, rtol=1e-5, atol=0)
