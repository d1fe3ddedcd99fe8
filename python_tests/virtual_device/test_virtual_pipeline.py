"""Pipelines on the virtual device, whose backend holds the host at the first message between two ranks."""

from datetime import timedelta

import device
import pytest
import torch
import torch.distributed as dist

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
