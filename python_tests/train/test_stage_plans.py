"""Plans of several stages on real ranks against one process on the whole batch: losses, gradients, weights."""

import dataclasses
import json

import pytest
import torch
from test_plan import MODEL, corpus, curve, cut_like, plan_of  # noqa: F401

from oases import Trainer
from oases.cli import main
from oases.errors import UsageError
from oases.plans.plan import Plan, Segment, Stage
from oases.testing import RankPool
from oases.train.config import config_for
from oases.train.plan import Run

DEEP = dataclasses.replace(MODEL, layers=4)
BATCH = 16


def staged(world, *stages, pipeline="one_f_one_b", micro_batches=4, **changes):
    """stages: for each its segments, (blocks, tp, schedule, sub-batches, recomputed layers)."""
    made = tuple(Stage(tuple(Segment(*segment) for segment in stage)) for stage in stages)
    return plan_of(
        world, stages=made, pipeline=pipeline, micro_batches=micro_batches, model=DEEP, global_batch=BATCH, **changes
    )


def even(world, stages, tp, schedule, again, pipeline, micro_batches=4, **changes):
    """Stages of as many layers. again: none, some or full."""
    chunks = 2 if pipeline == "interleaved" else 1
    blocks = DEEP.num_blocks // stages // chunks
    layers = (blocks + 1) // 2
    recomputed = {"none": 0, "some": layers // 2, "full": layers}[again]
    segment = (blocks, tp, schedule, 2 if schedule == "oases" else 1, recomputed)
    return staged(world, *[[segment] * chunks] * stages, pipeline=pipeline, micro_batches=micro_batches, **changes)


# Every pair of pipeline, schedule inside of a stage, recomputation and cut of the four ranks.
COVER = {
    "gpipe 4": even(4, 4, 1, "sync", "full", "gpipe", 8),
    "gpipe 2 tp 2": even(4, 2, 2, "oases", "some", "gpipe"),
    "gpipe 2 dp 2": even(4, 2, 1, "oases", "none", "gpipe", 1),
    "1f1b 4": even(4, 4, 1, "oases", "none", "one_f_one_b"),
    "1f1b 2 tp 2": even(4, 2, 2, "sync", "full", "one_f_one_b", 8),
    "1f1b 2 dp 2": even(4, 2, 1, "sync", "some", "one_f_one_b", 2, zero=True),
    "pre 4": even(4, 4, 1, "oases", "full", "pre_recompute", 8),
    "pre 2 tp 2": even(4, 2, 2, "sync", "some", "pre_recompute", 2),
    "pre 2 dp 2": even(4, 2, 1, "oases", "none", "pre_recompute", 2),
    "last 4": even(4, 4, 1, "sync", "none", "last_no_recompute", 8),
    "last 2 tp 2": even(4, 2, 2, "oases", "full", "last_no_recompute"),
    "last 2 dp 2": even(4, 2, 1, "oases", "some", "last_no_recompute"),
    "shifted 4": even(4, 4, 1, "oases", "full", "shifted_critical_path", 8),
    "shifted 2 tp 2": even(4, 2, 2, "oases", "none", "shifted_critical_path"),
    "shifted 2 dp 2": even(4, 2, 1, "sync", "some", "shifted_critical_path", 2, zero=True),
    "interleaved 4": even(4, 4, 1, "sync", "none", "interleaved"),
    "interleaved 2 tp 2": even(4, 2, 2, "oases", "full", "interleaved"),
    "interleaved 2 dp 2": even(4, 2, 1, "sync", "some", "interleaved", 2),
    "zero bubble 4": even(4, 4, 1, "sync", "full", "zb_h1"),
    "zero bubble 2 tp 2": even(4, 2, 2, "oases", "some", "zb_h1", 8),
    "zero bubble 2 dp 2": even(4, 2, 1, "sync", "none", "zb_h1", 2, zero=True),
    "uneven": staged(
        4,
        [(1, 1, "sync", 1)],
        [(3, 1, "oases", 2, 1)],
        [(2, 1, "sync", 1, 1)],
        [(2, 1, "oases", 2)],
        pipeline="shifted_critical_path",
    ),
    "degrees inside": staged(
        4,
        [(1, 2), (1, 1, "oases", 2, 1), (1, 2, "sync", 1)],
        [(1, 2), (4, 1, "oases", 2, 2)],
        pipeline="pre_recompute",
        micro_batches=2,
        zero=True,
    ),
    "head of another degree": staged(4, [(2, 1), (1, 2)], [(5, 2, "oases", 2, 1)], micro_batches=2),
}


@pytest.fixture(scope="module")
def alone(corpus):  # noqa: F811
    return curve(Trainer(config_for(plan_of(1, (8, 1), model=DEEP), config_values(corpus))))


def config_values(data):
    return {"steps": 3, "warmup": 1, "validation_batches": 1, "clip": 0.5, "learning_rate": 1e-2, "data": data}


def check_staged(text, data, expected):
    plan = Plan.from_json(text)
    trainer = Trainer(config_for(plan, config_values(data)), plan=plan)
    first, losses, gradients, weights, validation = curve(trainer)
    assert first == pytest.approx(expected[0], rel=1e-12)
    assert losses == pytest.approx(expected[1], rel=1e-10)
    assert validation == pytest.approx(expected[4], rel=1e-10)
    for mine, whole in ((gradients, expected[2]), (weights, expected[3])):
        theirs = cut_like(trainer.model, {name: whole[name] for name in mine})
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    trainer.close()
    return sorted(gradients)


@pytest.mark.parametrize("name", COVER)
def test_stages_train_like_one_process(four_ranks, corpus, alone, name):  # noqa: F811
    held = four_ranks.run(check_staged, COVER[name].to_json(), corpus, alone)
    assert set().union(*held) == set(alone[2])


def refused(plan, message):
    with pytest.raises(UsageError, match=message):
        Run(config_for(plan, {}), plan).corpus()


def test_stages_that_cannot_be_executed_are_refused():
    quarter = [(2, 1, "sync", 1)]
    refused(
        staged(8, *[[(1, 1, "sync", 1)]] * 8, micro_batches=8), "8 stages are more than the 4 layers of the model"
    )
    refused(
        staged(4, *[quarter] * 4, micro_batches=2), "one_f_one_b needs as many micro-batches as stages, got 2 for 4"
    )
    with pytest.raises(UsageError, match="micro-batches in multiples of the 4 stages"):
        even(4, 4, 1, "sync", "none", "interleaved", 2)
    with pytest.raises(UsageError, match="stage 0 has 1 segments; interleaved runs 2 parts"):
        staged(4, *[quarter] * 4, pipeline="interleaved")
    refused(
        staged(4, [(4, 1)], [(4, 2)], micro_batches=2),
        "part 0 of the pipeline ends with tp 1 and part 1 begins with tp 2",
    )
    with pytest.raises(UsageError, match="stage 1 has no blocks"):
        staged(4, [(8, 1)], [], micro_batches=2)
    with pytest.raises(UsageError, match="3 stages do not divide 4 ranks"):
        staged(4, *[[(2, 1)], [(2, 1)], [(4, 1)]])
    with pytest.raises(UsageError, match="unknown pipeline 'nosuch'"):
        staged(4, [(4, 1)], [(4, 1)], pipeline="nosuch")
    plan = even(4, 2, 2, "sync", "none", "gpipe")
    with pytest.raises(UsageError, match="for 4 ranks, the run has 1"):
        Trainer(config_for(plan, {}), plan=plan)


EIGHT = even(8, 2, 2, "oases", "some", "shifted_critical_path", zero=True)


def test_eight_ranks_train_like_one_process(corpus, alone):  # noqa: F811
    with RankPool(8) as eight_ranks:
        eight_ranks.run(check_staged, EIGHT.to_json(), corpus, alone)
        deep = even(8, 4, 2, "sync", "full", "pre_recompute", 8)
        eight_ranks.run(check_staged, deep.to_json(), corpus, alone)


def test_the_command_line_executes_stages(ranks_at_hand, corpus, alone, tmp_path):  # noqa: F811
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text(COVER["shifted 2 tp 2"].to_json())
    options = ["--steps", "3", "--warmup", "1", "--validation-batches", "1", "--clip", "0.5"]
    main(["train", "--plan", str(plan), "--data", corpus, "--json", str(out), "--learning-rate", "1e-2", *options])
    result = json.loads(out.read_text())
    assert result["losses"] == pytest.approx(alone[1], rel=1e-5)
    assert result["validation_loss"] == pytest.approx(alone[4], rel=1e-5)
    labels = {row["where"] for row in result["overlap"]["others"]}
    assert {"activations, stage 0 to 1", "gradients, stage 1 to 0"} <= labels
