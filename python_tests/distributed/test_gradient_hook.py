"""Averages of quantised gradients: DDP's hook, our own buckets, and training with them."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import oases
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.replicas import average_replicas
from oases.errors import UsageError
from oases.models.options import Degrees
from oases_train.config import TrainConfig
from oases_train.plan import Run
from oases_train.trainer import Trainer


def model_and_batch():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30))
    torch.manual_seed(dist.get_rank())
    return model, torch.randn(16, 40)


def gathered(x):
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return torch.stack(found)


def check_sum(model, exact, steps, bound):
    """Sums of the gradients of several steps, within what one step's rounding loses, and equal on all ranks."""
    for total, mine in zip(exact, model.parameters(), strict=True):
        assert float((mine.total - total).norm() / total.norm()) < bound / steps
        same = gathered(mine.grad)
        assert torch.equal(same[0], same[1])


def train(model, backward, steps=20):
    exact = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.total = torch.zeros_like(parameter)
    _, batch = model_and_batch()
    plain, _ = model_and_batch()
    for _ in range(steps):
        model.zero_grad()
        plain.zero_grad()
        backward(batch)
        plain(batch).square().mean().backward()
        for total, mine, other in zip(exact, model.parameters(), plain.parameters(), strict=True):
            total += gathered(other.grad).mean(0)
            mine.total += mine.grad
    return exact


def check_hook(state):
    model, _ = model_and_batch()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
    wrapped.register_comm_hook(state, oases.quantized_hook)
    check_sum(model, train(model, lambda batch: wrapped(batch).square().mean().backward()), 20, 0.04)


# The bound is twice the relative error of one sum, for each of the two times that it is rounded.
@pytest.mark.parametrize("state", ["int8", None])
def test_ddp_loses_one_rounding_over_all_steps(two_ranks, state):
    two_ranks.run(check_hook, state)


def check_wrong_states():
    model, batch = model_and_batch()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook("int4", oases.quantized_hook)
    with pytest.raises(UsageError, match=r"quantized_hook: the state, .* must be 'int8' or None, got 'int4'"):
        wrapped(batch).sum().backward()
    with pytest.raises(UsageError, match=r"gradient_wire must be 'int8' or None, got 'fp8'"):
        GradientAverager([(model.parameters(), dist.group.WORLD)], wire="fp8")


def test_wrong_states(two_ranks):
    two_ranks.run(check_wrong_states)


def check_buckets():
    model, _ = model_and_batch()
    average = GradientAverager([(model.parameters(), dist.group.WORLD)], 5000, "int8")

    def backward(batch):
        with average.overlapped():
            model(batch).square().mean().backward()

    check_sum(model, train(model, backward), 20, 0.04)


def test_buckets_lose_one_rounding_over_all_steps(two_ranks):
    two_ranks.run(check_buckets)


def check_replicas():
    model, _ = model_and_batch()
    average_replicas(model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), "int8")
    check_sum(model, train(model, lambda batch: model(batch).square().mean().backward()), 20, 0.04)


def test_replicas_lose_one_rounding_over_all_steps(two_ranks):
    two_ranks.run(check_replicas)


CONFIG = TrainConfig(
    hidden=32, layers=2, heads=4, sequence=16, batch=8, steps=8, degrees=Degrees(data=2, tensor=1), warmup=1
)


def saved_megabytes():
    return sum(row.saved_bytes for row in oases.report().others if "gradients" in row.where) / 1e6


def losses(data, changes):
    """Losses, and the megabytes of gradients that were not sent."""
    before = saved_megabytes()
    trainer = Trainer(dataclasses.replace(CONFIG, data=data, **changes))
    found = [trainer.step() for _ in range(CONFIG.steps)]
    saved = saved_megabytes() - before
    trainer.close()
    return found, saved


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("sharding", [{}, {"zero": True}, {"fsdp": True}])
def test_training(two_ranks, tmp_path, sharding):
    data = tmp_path / "text.txt"
    data.write_text("To be, or not to be, that is the question. " * 200)
    (exact, none), (lossy, saved) = (
        two_ranks.run(losses, str(data), {"gradient_wire": wire, **sharding})[0] for wire in ("none", "int8")
    )
    assert lossy != exact
    assert lossy == pytest.approx(exact, rel=2e-3)
    assert none == 0
    # Per step all parameters in fp32, less a byte and a 32nd of each: 34,112 parameters, some with padding.
    assert saved == pytest.approx(CONFIG.steps * 34112 * (4 - 33 / 32) / 1e6, rel=0.05)


def check_other_wires(data, sharding):
    """A run whose ranks were given other wires ends with an error on all of them, before gradients are sent."""
    wire = ["int8", "none"][dist.get_rank()]
    with pytest.raises(UsageError, match=r"the gradient_wire differs .* int8 on rank 0, None on rank 1"):
        Trainer(dataclasses.replace(CONFIG, data=data, gradient_wire=wire, **sharding)).step()


@pytest.mark.parametrize("sharding", [{}, {"fsdp": True}])
def test_ranks_with_other_wires(two_ranks, tmp_path, sharding):
    data = tmp_path / "text.txt"
    data.write_text("To be, or not to be, that is the question. " * 200)
    two_ranks.run(check_other_wires, str(data), sharding)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 4}, "gradient_wire 'int8' is not for .* with experts; leave out"),
        ({"degrees": Degrees(tensor=2)}, "gradient_wire 'int8': there are no data-parallel ranks; give --dp"),
    ],
)
def test_what_it_is_not_for(changes, message):
    with pytest.raises(UsageError, match=message):
        Run.of(dataclasses.replace(CONFIG, gradient_wire="int8", **changes), 2)
