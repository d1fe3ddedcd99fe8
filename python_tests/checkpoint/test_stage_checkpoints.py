"""Checkpoints of runs with pipeline stages: any other cut of the ranks goes on from them, in any order."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plan_runs import DEEP, even, plan_of, staged, stored_once, whole
from torch.distributed.checkpoint import HuggingFaceStorageReader

from oases import Trainer
from oases.plans.plan import Plan
from oases_train.config import config_for

# (data, pipeline, tensor) and what else changes from leg to leg; each goes on from the checkpoint of the one before.
LEGS = {
    "1,2,2": even(4, 2, 2, "oases", "full", "one_f_one_b"),
    "2,1,2 sharded": plan_of(4, (8, 2, "oases", 2, 2), model=DEEP, zero=True),
    "1,1,1": plan_of(1, (8, 1), model=DEEP),
    "1,4,1 shifted": even(4, 4, 1, "sync", "full", "shifted_critical_path", 8),
    "1,2,2 zb v": even(4, 2, 2, "sync", "some", "zb_v"),
    "1,2,2 interleaved": even(4, 2, 2, "sync", "some", "interleaved"),
    "2,2,1 zero bubble, sharded": even(4, 2, 1, "sync", "none", "zb_h1", 2, zero=True),
    "2,2,1 degrees inside, sharded": staged(
        4, [(1, 2), (1, 1, "oases", 2, 1), (1, 2, "sync", 1)], [(1, 2), (4, 1, "oases", 2, 2)],
        pipeline="pre_recompute", micro_batches=2, zero=True,
    ),
    "1,2,2 zero bubble": even(4, 2, 2, "sync", "some", "zb_h1"),
    "2,1,2": plan_of(4, (8, 2, "oases", 2), model=DEEP, micro_batches=2),
    "1,2,2 again": even(4, 2, 2, "oases", "none", "gpipe"),
}  # fmt: skip
STEPS = 2
"""Steps of each leg."""


def config_of(plan, data, **changes):
    steps = STEPS * len(LEGS)
    values = {"steps": steps, "warmup": 2, "validation_batches": 1, "learning_rate": 1e-2, "data": data}
    return config_for(plan, values | changes)


def leg(text, data, folder, resumed):
    """Losses of a leg that goes on from `resumed`, what it read saved at once, and what its steps made of it."""
    plan = Plan.from_json(text)
    trainer = Trainer(config_of(plan, data, resume=resumed), plan=plan)
    trainer.save(f"{folder}/read")
    losses = [trainer.step() for _ in range(STEPS)]
    trainer.save(f"{folder}/made")
    tied, table = trainer.model.tied, None
    if tied is not None:  # compared by the stages that have it
        table = whole(tied.detach()).clone()
        other = [torch.empty_like(table) for _ in range(2)]
        dist.all_gather(other, table, group=trainer.mesh.embedding_group)
        assert torch.equal(*other)
    trainer.close()
    return losses


def tensors_of(path):
    """All whole tensors of a checkpoint, weights and moments, each of which it has once."""
    found = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype)
        for name, kept in stored_once(path).items()
        if name.startswith(("model.", "optimizer."))
    }
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return found


@pytest.fixture(scope="module")
def alone(corpus):
    plan = LEGS["1,1,1"]
    trainer = Trainer(config_of(plan, corpus), plan=plan)
    return [trainer.step() for _ in range(STEPS * len(LEGS))]


@pytest.mark.slow
def test_any_cut_goes_on_from_any_other(four_ranks, corpus, alone, tmp_path):
    resumed, losses = None, []
    for name, plan in LEGS.items():
        folder = tmp_path / name.replace(" ", "-")
        run = four_ranks.run if plan.world == 4 else lambda function, *arguments: [function(*arguments)]
        said = run(leg, plan.to_json(), corpus, str(folder), resumed)
        assert all(one == said[0] for one in said), name
        losses += said[0]
        if resumed is not None:  # what was read is what was written, bit by bit, moments included
            written, read = tensors_of(resumed), tensors_of(folder / "read")
            assert written.keys() == read.keys()
            assert len(written) == 4 * sum(
                1 for key in written if key.startswith("model.")
            )  # two moments and the step
            assert all(torch.equal(written[key], read[key]) for key in written), name
        resumed = str(folder / "made")
    assert losses == pytest.approx(alone, rel=1e-4)
