"""Plans for tests, of a small GPT, and their runs compared with one process on the whole batch."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader

from oases import TrainConfig, Trainer
from oases.core.blocks.sharding import holders, sharded_parameters
from oases.core.execution.group import group_rank, group_size
from oases.plans.gpt import gpt, resized
from oases.plans.pipelines import chunks_of
from oases.plans.plan import Plan, Segment, Stage
from oases_train.config import config_for

MODEL = gpt(hidden=16, layers=2, heads=4, sequence=8, vocabulary=256)
BATCH = 16
DEEP = resized(MODEL, layers=4)


EXPERTS = TrainConfig(
    hidden=32, layers=2, heads=4, sequence=16, batch=8, steps=6, warmup=2, validation_batches=1, learning_rate=3e-3,
    experts=4, expert_hidden=48, balance_weight=0.0,
)  # fmt: skip
"""A small GPT with experts."""


def plan_of(world, *segments, micro_batches=1, zero=False, **changes):
    """segments: (blocks, tp, schedule, sub-batches, recomputed layers), those with a default left out at will."""
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


def staged(world, *stages, pipeline="one_f_one_b", micro_batches=4, **changes):
    """stages: for each its segments, (blocks, tp, schedule, sub-batches, recomputed layers)."""
    made = tuple(Stage(tuple(Segment(*segment) for segment in stage)) for stage in stages)
    return plan_of(
        world, stages=made, pipeline=pipeline, micro_batches=micro_batches, model=DEEP, global_batch=BATCH, **changes
    )


def even(world, stages, tp, schedule, again, pipeline, micro_batches=4, **changes):
    """Stages of as many layers. again: none, some or full."""
    chunks = chunks_of(pipeline)
    blocks = DEEP.num_blocks // stages // chunks
    layers = (blocks + 1) // 2
    recomputed = {"none": 0, "some": layers // 2, "full": layers}[again]
    segment = (blocks, tp, schedule, 2 if schedule == "oases" else 1, recomputed)
    return staged(world, *[[segment] * chunks] * stages, pipeline=pipeline, micro_batches=micro_batches, **changes)


def config_values(data):
    return {"steps": 3, "warmup": 1, "validation_batches": 1, "clip": 0.5, "learning_rate": 1e-2, "data": data}


def config_of(data, **changes):
    """The configuration of a run of MODEL, whatever its plan."""
    return config_for(plan_of(1, (4, 1)), config_values(data) | changes)


def whole(tensor):
    """Tensor whose shards over data-parallel ranks are gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def curve(trainer, steps=3):
    """Losses and gradients of the first step, in double precision, then weights and the validation loss."""
    trainer.model.double()
    first = trainer.backward(0)
    gradients = {name: whole(p.grad).clone() for name, p in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad()
    losses = [trainer.step() for _ in range(trainer.steps_done, steps)]
    weights = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    return first, losses, gradients, weights, trainer.validate()


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


def check_curve(trainer, expected):
    """Train three steps and compare with one process; return the names of the parameters of this rank."""
    first, losses, gradients, weights, validation = curve(trainer)
    assert first == pytest.approx(expected[0], rel=1e-12)
    assert losses == pytest.approx(expected[1], rel=1e-10)
    assert validation == pytest.approx(expected[4], rel=1e-10)
    for mine, uncut in ((gradients, expected[2]), (weights, expected[3])):
        theirs = cut_like(trainer.model, {name: uncut[name] for name in mine})
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    return sorted(gradients)


def check_plan(text, data, expected):
    """Train three steps of a plan and compare with one process; return the names of the parameters of this rank."""
    plan = Plan.from_json(text)
    trainer = Trainer(config_for(plan, config_values(data)), plan=plan)
    names = check_curve(trainer, expected)
    trainer.close()
    return names


def one_process(model, data):
    """`curve` of a model in one process."""
    return curve(Trainer(config_for(plan_of(1, (model.num_blocks, 1), model=model), config_values(data))))


def stored_once(path):
    """Metadata of a checkpoint's tensors by name, of each of which its files hold every element once."""
    found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    for name, each in found.items():
        assert each.size.numel() == sum(chunk.sizes.numel() for chunk in each.chunks), name
    headers = [8 + int.from_bytes(file.read_bytes()[:8], "little") for file in Path(path).glob("*.safetensors")]
    files = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    # What two stages or replicas had both written would lie in the files besides.
    assert files - sum(headers) == sum(each.size.numel() * each.properties.dtype.itemsize for each in found.values())
    return found
