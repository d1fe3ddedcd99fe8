"""Random masks under tensor parallelism, and replicas around it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from autotp.comparison import CLOSE
from autotp.plain_models import (
    WIDTH,
    Block,
    Plain,
    made,
    spec,
    tokens,
)  # fmt: skip
from torch import nn

import oases
from oases.core.blocks.sharding import cuts

pytestmark = pytest.mark.usefixtures("shared_traces")


class Undone(nn.Module):
    """x = dropout(x), then x - x, in which one of both comes through a sum: zero if both saw one mask."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(x)
        return x - self.down(self.up(x))


def undone():
    model = made(Plain, Undone)
    with torch.no_grad():
        for layer in model.layers:
            layer.up.weight.copy_(torch.eye(WIDTH))
            layer.down.weight.copy_(torch.eye(WIDTH))
    oases.parallelize(model, spec=spec(vocabulary=""))
    model.head = nn.Identity()
    return float(model(tokens()).abs().max()), model.oases_partition.layers[0].reason


def test_a_mask_is_the_same_before_and_after_a_sum(two_ranks):
    for found, reason in two_ranks.run(undone):
        assert found == 0
        assert "needed before and after a sum" in reason


class Dropping(Block):
    """Attention, features and residuals all drop."""

    def __init__(self, **options):
        super().__init__(drop=0.2, **options)
        self.drop = nn.Dropout(0.2)

    def mlp(self, x):
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))

    def forward(self, x):
        return super().forward(x)


class DroppingModel(Plain):
    def forward(self, tokens):
        x = F.dropout(self.table(tokens), 0.2, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def dropped(options, keys):
    """Gradients of what is whole, and the loss, after each rank took a seed of its own."""
    found = []
    model = made(DroppingModel, Dropping, layout="q|k|v", keys=keys)
    oases.parallelize(model, spec=spec(vocabulary=""), **options)
    known = cuts(model)
    torch.manual_seed(7 + dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        result = model(tokens())
        result.pow(2).sum().backward()
        whole = [p.grad.to_local() for p in model.parameters() if id(p) not in known]
        found.append([result.detach(), *whole])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("keys", [2, 1])  # of one, attention is whole in front of a sum
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"schedule": "layers"}])
def test_masks_of_what_is_whole_are_the_same_on_all_ranks(two_ranks, options, keys):
    one, other = two_ranks.run(dropped, options, keys)
    for step, theirs in zip(one, other, strict=True):
        for mine, its in zip(step, theirs, strict=True):
            assert torch.equal(mine, its)
    assert not torch.equal(one[0][0], one[1][0])  # steps draw anew


def recomputed(keys):
    plain, again = dropped({}, keys), dropped({"recompute": "full"}, keys)
    return max(
        float((a - b).abs().max()) for x, y in zip(plain, again, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.long
def test_masks_are_recomputed(two_ranks):
    assert max(two_ranks.run(recomputed, 2)) < 1e-9


def over_two_dimensions():
    """2 x 2: what two replicas average is the gradient of the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, parallel = made(Plain), made(Plain)
    oases.parallelize(parallel, mesh=mesh, spec=spec())
    data = tokens(8)
    model(data).pow(2).mean().backward()
    parallel(data.chunk(2)[mesh.get_local_rank("dp")]).pow(2).mean().backward()
    known, worst = cuts(parallel), 0.0
    theirs = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        mine, gradient = theirs[name], parameter.grad
        if id(mine) in known:
            gradient = known[id(mine)].take(gradient, mesh.get_local_rank("tp"), 2)
        worst = max(worst, float((mine.grad.to_local() - gradient).abs().max()))
    return worst


@pytest.mark.slow
def test_a_mesh_of_replicas_and_tensor_parallel_ranks(four_ranks):
    assert max(four_ranks.run(over_two_dimensions)) < CLOSE
