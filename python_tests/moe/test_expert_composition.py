"""Blocks of experts in a pipeline's stages: passes of several micro-batches in flight, over ranks of each stage."""

import pytest
import torch
import torch.distributed as dist
from moe.expert_blocks import HIDDEN, made

from oases.core.schedule.pipeline import generate_pipeline
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages
from oases.distributed.pipeline import StageRunner
from oases.moe.stack import ExpertStack

MICRO_BATCHES, STAGES = 4, 2


def sample(m, rank, ranks):
    """The rank's part of a micro-batch of eight samples."""
    whole = torch.randn(8, 3, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(m))
    return whole.chunk(ranks)[rank]


def options(placement, recompute):
    schedule = "plain" if placement == "none" else "block_wise"
    return {"schedule": schedule, "recompute": recompute}


def alone(placement):
    """One process: losses, and gradients by block. balance losses are each rank's own, so there are none."""
    torch.manual_seed(3)
    blocks = made(placement="none", balance_weight=0.0, z_weight=0.0)
    blocks += made(placement="none", balance_weight=0.0, z_weight=0.0)
    losses = []
    for m in range(MICRO_BATCHES):
        x = sample(m, 0, 1)
        for block in blocks:
            x = block(x)
        losses.append(x.square().mean() / MICRO_BATCHES)
        losses[-1].backward()
    return torch.stack(losses).detach(), blocks


def check_stages(name, placement, recompute):
    ranks = dist.get_world_size() // STAGES
    meshes = [Mesh([1], stage=stage, num_stages=STAGES) for stage in range(STAGES)]
    mesh = meshes[dist.get_rank() // ranks]
    group, rank = mesh.data(1), dist.get_rank() % ranks
    blocks = made(placement=placement, balance_weight=0.0, z_weight=0.0, process_group=group)
    stack = ExpertStack(blocks, **options(placement, recompute))
    pipeline = generate_pipeline(name, STAGES, MICRO_BATCHES)
    messages = StageMessages(pipeline, mesh, [1])
    run = StageRunner(pipeline, mesh.stage, messages)

    def forward(part, m, inputs, context):
        y = stack(inputs[0] if inputs else sample(m, rank, ranks), context=context)
        return [y.square().mean() / MICRO_BATCHES if part == STAGES - 1 else y]

    own = {id(p) for block in blocks for p in block.experts.experts.parameters()}
    average = GradientAverager([([p for p in stack.parameters() if id(p) not in own], group)])
    for _ in range(3):  # placements follow the loads of the steps before
        stack.zero_grad()
        losses = run.run(forward, average)
    if placement != "none":
        assert any(block.experts.last.placement.moved for block in blocks)
    found = {}
    for number, block in enumerate(blocks, start=3 * mesh.stage):
        for key, parameter in block.named_parameters():
            gradient = parameter.grad
            if id(parameter) in own:
                parts = [torch.empty_like(gradient) for _ in range(ranks)]
                dist.all_gather(parts, gradient, group=group)
                gradient = torch.cat(parts) / ranks  # of a mean over the ranks' losses
            found[number, key] = gradient
    total = torch.stack(losses) if losses else None
    if total is not None:
        dist.all_reduce(total, group=group)
        total /= ranks
    messages.close()
    mesh.destroy()
    return total, found


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "placement", "recompute"),
    [("one_f_one_b", "none", False), ("one_f_one_b", "prophet", True), ("gpipe", "faster_moe", False),
     ("shifted_critical_path", "prophet", False)],
)  # fmt: skip
def test_stages_of_experts_train_like_one_process(four_ranks, name, placement, recompute):
    torch.manual_seed(3)
    losses, blocks = alone(placement)
    for total, found in four_ranks.run(check_stages, name, placement, recompute):
        if total is not None:
            torch.testing.assert_close(total, losses, rtol=1e-10, atol=1e-12)
        for (number, key), gradient in found.items():
            expected = blocks[number].get_parameter(key).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
