"""The GPT with experts: its loss and gradients on 2 and 4 ranks, with any placement, equal those of one process."""

import pytest
import torch
import torch.distributed as dist

from oases.core.blocks.sharding import holders
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.mesh import Mesh
from oases.models import MoEGPT, MoEGPTConfig
from oases.moe.costs import Costs

CONFIG = MoEGPTConfig(vocabulary=32, hidden=16, layers=2, heads=4, sequence=8, experts=4, expert_hidden=24)
COSTS = Costs(token_seconds=1e-3, token_bytes=128, expert_bytes=256, bandwidth=1e9)
"""Expensive compute and a free link, so that experts are copied."""


def gradients(tensor=1, steps=2, **options):
    """Losses of some steps of gradient descent, last gradients, shard counts, replicas."""
    mesh = Mesh([tensor])
    sizes = MoEGPTConfig(**vars(CONFIG) | {"shared_hidden": 8})
    model = MoEGPT(sizes, mesh=mesh, costs=COSTS, **options).double()
    average = GradientAverager(model.parts())
    replica, replicas = mesh.replica(tensor), mesh.replicas(tensor)
    losses, copies = [], 0
    for step in range(steps):
        whole = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(step))
        tokens, targets = (part.unflatten(0, (replicas, -1))[replica] for part in (whole[:, :-1], whole[:, 1:]))
        loss = model.loss(tokens, targets)
        with average.overlapped():
            loss.backward()
        copies += sum(len(layer.last.placement.moved) for layer in model.layers)
        losses.append(loss.item())
        with torch.no_grad():
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    total = torch.tensor(losses, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    cut_by = holders(model)
    owners = {name: getattr(cut_by.get(id(p)), "tensor_parallel", 1) for name, p in model.named_parameters()}
    mesh.destroy()
    return total.tolist(), found, owners, copies


@pytest.fixture(scope="module")
def alone():
    return gradients()


def check(results, alone, tensor):
    for rank, (losses, found, owners, _) in enumerate(results):
        assert losses == pytest.approx(alone[0], rel=1e-12)
        for name, whole in alone[1].items():
            part, parts = found[name], owners[name]
            if parts > 1:
                dim = next(d for d in range(whole.dim()) if whole.shape[d] != part.shape[d])
                whole = whole.chunk(parts, dim)[rank % parts]
            torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-12, msg=f"{name} on rank {rank}")


@pytest.mark.few(2)
@pytest.mark.parametrize("placement", ["none", "prophet", "faster_moe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_two_replicas_have_the_gradients_of_one_process(two_ranks, alone, placement, recompute):
    results = two_ranks.run(gradients_of, 1, placement, recompute)
    check(results, alone, 1)
    if placement == "prophet":
        assert results[0][3] > 0


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.long), 2, 4])
def test_four_ranks_have_them_too(four_ranks, alone, tensor):
    check(four_ranks.run(gradients_of, tensor, "prophet", False), alone, tensor)


def gradients_of(tensor, placement, recompute):
    return gradients(tensor, placement=placement, recompute=recompute)


def test_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    one = MoEGPT(CONFIG)
    after = torch.rand(1)
    torch.manual_seed(2)
    other = MoEGPT(CONFIG)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)  # nobody else's numbers are drawn
    assert one.layers[0].experts.up.std() > 2 * one.layers[0].experts.down.std()
