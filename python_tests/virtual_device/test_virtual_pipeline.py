"""Pipelines on the virtual device, whose backend holds the host at the first message between two ranks."""

from datetime import timedelta

import device
import pytest
import torch
import torch.distributed as dist
from auto_choice import measuring
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.checkpoint.contents import drawing_parts
from oases.core.schedule import Op
from oases.core.schedule.pipeline import generate_pipeline
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages, waiting_for
from oases.distributed.pipeline import StageRunner

STAGES, MICRO_BATCHES, WIDTH = 3, 4, 8


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(each, marks=pytest.mark.long) for each in ("gpipe", "one_f_one_b")), "zb_h1", "pre_recompute"],
)
def test_three_stages_go_through_and_are_one_model(three_virtual, name):
    check_run(three_virtual, name, 2)


@pytest.mark.slow
def test_three_stages_under_two_hundred_random_delays(three_virtual):
    check_run(three_virtual, "one_f_one_b", 200)


def check_run(ranks, name, steps):
    losses, expected = ranks.run(runs_a_pipeline, name, steps)[-1]  # a hang is a failure
    torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-11)


def layers():
    torch.manual_seed(2)
    return [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(STAGES)]


def sample(m):
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(m))


def plain(steps):
    """Losses of so many steps of one process; gradients of the layers."""
    model, losses = torch.nn.Sequential(*layers()), []
    for _ in range(steps):
        for m in range(MICRO_BATCHES):
            losses.append(model(sample(m)).square().mean() / MICRO_BATCHES)
            losses[-1].backward()
    return torch.stack(losses).detach(), [layer.weight.grad for layer in model]


def runs_a_pipeline(name, steps):
    module, place = device.take()
    rank = dist.get_rank()
    pipeline = generate_pipeline(name, STAGES, MICRO_BATCHES)
    mesh = Mesh.of_stages([[1]] * STAGES)
    layer = layers()[rank].to(place)
    messages = StageMessages(pipeline, mesh, [1] * (STAGES - 1), device=place)
    runner = StageRunner(pipeline, rank, messages)

    def forward(part, m, inputs, context):
        y = layer(inputs[0] if inputs else sample(m).to(place))
        return [y.square().mean() / MICRO_BATCHES if part == STAGES - 1 else y]

    losses = []
    for seed in range(steps):
        module.set_delays(2e-3, 1 + seed)
        losses += [loss.detach().cpu() for loss in runner.run(forward)]
    torch.accelerator.synchronize()
    expected, gradients = plain(steps)
    torch.testing.assert_close(layer.weight.grad.cpu(), gradients[rank], rtol=1e-11, atol=1e-11)
    messages.close()
    mesh.destroy()
    return (torch.stack(losses), expected) if losses else None


def test_the_first_message_holds_no_host(two_virtual):
    """Ranks are connected before: NCCL's first message holds both hosts until they have met."""
    _, said = two_virtual.run(sends_before_the_other_comes)
    waiting, received, afterwards = said
    assert waiting == "receive F 1.1 on stage 1, from stage 0 (rank 0)"
    assert received == [1.0] * 4
    assert afterwards == ""


def sends_before_the_other_comes():
    _, place = device.take()
    store, stage, mesh = dist.distributed_c10d._get_default_store(), dist.get_rank(), Mesh.of_stages([[1]] * 2)
    messages = StageMessages(generate_pipeline("gpipe", 2, 2), mesh, [1], device=place)
    found = None
    if stage == 0:
        messages.send(Op("send", 0, 0, "F"), [torch.ones(4, device=place)])
        store.set("sent", "1")
        store.wait(["asked"])
        messages.send(Op("send", 0, 1, "F"), [torch.ones(4, device=place)])
    else:
        store.wait(["sent"], timedelta(seconds=30))
        ops = [Op("receive", 1, m, "F") for m in range(2)]
        messages.begin(ops)
        received = messages.receive(ops[0])[0].tolist()
        messages.receive(ops[1])
        waiting = waiting_for()
        store.set("asked", "1")
        torch.accelerator.synchronize()
        found = [waiting, received, waiting_for()]
    torch.accelerator.synchronize()
    messages.close()
    mesh.destroy()
    return found


@device.virtual_only
def test_stages_with_tensor_parallelism_measure_their_schedules(four_virtual, tmp_path):
    """No turn of `auto` waits for the whole device, which a posted receive keeps busy until another rank goes on."""
    for losses, expected, turns in four_virtual.run(trains_in_stages, 4, tmp_path / "choices"):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
        assert turns >= 4


def trains_in_stages(steps, path):
    module, place = device.take()
    module.set_costs(op_seconds=1e-3, link_seconds=5e-3)
    mesh = init_device_mesh(device.NAME, (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    batches = [torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(n)) for n in range(steps)]

    def run(model, loss_of, place):
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for ids in batches:
            losses.append(loss_of(model, ids.to(place)).item())
            optimizer.step(), optimizer.zero_grad()
        return torch.tensor(losses)

    def loss_in_one_process(model, ids):
        loss = model(ids)
        loss.backward()
        return loss

    inputs = ((batches[0].to(place),), {})
    with measuring(path):
        model = oases.parallelize(
            small_model().to(place), mesh=mesh, micro_batches=2, spec=oases.ParallelSpec(inputs=inputs)
        )
        losses = run(model, lambda model, ids: model.train_step(ids), place)
    stacks = [part for _, part in drawing_parts(model) if isinstance(part, oases.OverlappedStack)]
    tunings = [each for stack in stacks for each in stack.chooser.tunings.values()]
    return losses, run(small_model(), loss_in_one_process, "cpu"), sum(len(each.turns) for each in tunings)


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(24, WIDTH), torch.nn.Linear(WIDTH, 24)
        self.layers = torch.nn.ModuleList(Residual() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def small_model():
    torch.manual_seed(1)
    return Small()
