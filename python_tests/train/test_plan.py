"""Plans executed on real ranks against one process on the whole batch; bad plans are refused before any rank starts."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from oases import TrainConfig, Trainer
from oases.errors import UsageError
from oases.parallel.group import group_rank, group_size
from oases.parallel.mesh import Mesh
from oases.parallel.sharding import holders, sharded_parameters
from oases.planner.plan import Plan, Segment, Stage
from oases.schedule import ScheduleError
from oases.simulator.model import ModelShape
from oases.train.plan import check, config_for, read_plan, require_fit

MODEL = ModelShape(hidden=16, layers=2, heads=4, sequence=8, vocabulary=256)
BATCH = 16


def plan_of(world, *segments, micro_batches=1, zero=False, **changes):
    made = tuple(Segment(*segment) for segment in segments)
    values = {"model": MODEL, "global_batch": BATCH, "stages": (Stage(made),), **changes}
    return Plan(world=world, ranks_per_node=world, micro_batches=micro_batches, zero=zero, **values)


PLANS = {
    2: {
        "dp 2": plan_of(2, (4, 1), zero=True),
        "tp 2": plan_of(2, (4, 2), micro_batches=2),
        "1 -> 2": plan_of(2, (2, 1, "cross_pass", 2, 1), (2, 2, "sync", 1)),
        "2 -> 1": plan_of(2, (1, 2), (3, 1, "oases", 3), micro_batches=2, zero=True),
    },
    4: {
        "dp 4": plan_of(4, (4, 1), micro_batches=2),
        "tp 2 x dp 2": plan_of(4, (4, 2, "oases", 2, 1), zero=True),
        "tp 4": plan_of(4, (4, 4, "cross_pass", 2, 2)),
        "2 -> 4": plan_of(4, (2, 2, "oases", 2), (2, 4, "oases", 2), micro_batches=2),
        "4 -> 2": plan_of(4, (2, 4, "cross_pass", 2, 1), (2, 2, "sync", 1), zero=True),
        "1 -> 4 -> 2": plan_of(4, (1, 1), (2, 4, "oases", 4, 1), (1, 2), micro_batches=2, zero=True),
        "attention 2, mlp 4": plan_of(4, (1, 2), (1, 4), (1, 2, "oases", 2, 1), (1, 4, "sync", 1)),
        "all recomputed": plan_of(4, (2, 4, "oases", 2, 1), (2, 1, "oases", 2, 1), micro_batches=2),
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} plus {i % 7} is {i + i % 7}.\n" for i in range(4000)))
    return str(path)


def config_of(corpus, **changes):
    values = {"steps": 3, "warmup": 1, "validation_batches": 1, "clip": 0.5, "learning_rate": 1e-2, "data": corpus}
    return config_for(plan_of(1, (4, 1)), values | changes)


def curve(trainer, steps=3):
    """Losses and gradients of the first step, in double precision, then weights and the validation loss."""
    trainer.model.double()
    first = trainer.backward(0)
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad()
    losses = [trainer.step() for _ in range(trainer.steps_done, steps)]
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return first, losses, gradients, weights, trainer.validate()


@pytest.fixture(scope="module")
def alone(corpus):
    return curve(Trainer(config_of(corpus)))


def cut_like(model, tensors):
    """Whole tensors by name as this rank holds them."""
    dims = {name: dim for name, _, dim in sharded_parameters(model)}
    found = holders(model)
    cut = {}
    for name, tensor in tensors.items():
        if name in dims:
            group = found[id(model.get_parameter(name))].process_group
            tensor = tensor.chunk(group_size(group), dims[name])[group_rank(group)]
        cut[name] = tensor
    return cut


def check_plan(text, corpus, expected):
    plan = Plan.from_json(text)
    trainer = Trainer(config_of(corpus), plan=plan)
    first, losses, gradients, weights, validation = curve(trainer)
    assert first == pytest.approx(expected[0], rel=1e-12)
    assert losses == pytest.approx(expected[1], rel=1e-10)
    assert validation == pytest.approx(expected[4], rel=1e-10)
    for mine, theirs in ((gradients, expected[2]), (weights, expected[3])):
        theirs = cut_like(trainer.model, theirs)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    trainer.mesh.destroy()


@pytest.mark.parametrize("name", PLANS[2])
def test_two_ranks_train_like_one(two_ranks, corpus, alone, name):
    two_ranks.run(check_plan, PLANS[2][name].to_json(), corpus, alone)


@pytest.mark.parametrize("name", PLANS[4])
def test_four_ranks_train_like_one(four_ranks, corpus, alone, name):
    four_ranks.run(check_plan, PLANS[4][name].to_json(), corpus, alone)


def test_one_rank_needs_no_group(corpus, alone):
    for plan in (plan_of(1, (4, 1)), plan_of(1, (2, 1), (2, 1, "oases", 2, 1), micro_batches=4, zero=True)):
        check_plan_alone = Trainer(config_of(corpus), plan=plan)
        assert curve(check_plan_alone)[1] == pytest.approx(alone[1], rel=1e-10)
