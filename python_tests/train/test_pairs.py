"""Every two ways of training in parallel against one process; what cannot be together; the covering array."""

import itertools

import pairs
import pytest
from covering import covering, every_pair, pairs_in
from plan_runs import MODEL, check_curve, config_values, curve, even, plan_of

from oases import TrainConfig, Trainer
from oases.core.execution.dtensors import local_of as local
from oases.errors import UsageError
from oases.plans.gpt import resized
from oases.plans.plan import Plan, Segment, Stage
from oases.testing import RankPool
from oases_train.config import config_for
from oases_train.plan import Run

KINDS = ("tensor", "sequence", "pipeline", "data", "fsdp", "recompute", "compile")


def together(*kinds):
    """A plan of them over as few ranks as they need, four samples and two sub-batches to a micro-batch."""
    tp = 2 if {"tensor", "sequence"} & set(kinds) else 1
    stages = 2 if "pipeline" in kinds else 1
    replicas = 2 if {"data", "fsdp"} & set(kinds) else 1
    blocks = MODEL.num_blocks // stages
    segment = Segment(blocks, tp, "oases", 2, int("recompute" in kinds), "sequence" in kinds)
    return plan_of(
        tp * stages * replicas,
        stages=(Stage((segment,)),) * stages,
        micro_batches=4 // replicas,
        fsdp="fsdp" in kinds,
    )


def check_equal(text, data, expected, compiled):
    plan = Plan.from_json(text)
    trainer = Trainer(config_for(plan, {**config_values(data), "compile": compiled}), plan=plan)
    names = check_curve(trainer, expected)
    held = sum(local(parameter).numel() for parameter in trainer.model.parameters())
    trainer.close()
    return names, held


SLOW = {("sequence", "compile"), ("data", "compile"), ("recompute", "compile")}


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(pair, marks=[pytest.mark.slow] if pair in SLOW else [])
        for pair in itertools.combinations(KINDS, 2)
    ],
    ids="+".join,
)
def test_any_two_train_like_one_process(two_ranks, four_ranks, corpus, plain_run, kinds):
    plan, compiled = together(*kinds), "aot_eager" if "compile" in kinds else "none"
    if plan.world == 1:
        found = [check_equal(plan.to_json(), corpus, plain_run, compiled)]
    else:
        pool = two_ranks if plan.world == 2 else four_ranks
        found = pool.run(check_equal, plan.to_json(), corpus, plain_run, compiled)
    assert set().union(*(names for names, _ in found)) == set(plain_run[2])


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("pipeline", ["pre_recompute", "interleaved", "zb_h1", "zb_v"])
def test_fsdp_in_other_pipelines(four_ranks, corpus, deep_plain_run, pipeline):
    plan = even(4, 2, 1, "oases", "full", pipeline, fsdp=True)
    four_ranks.run(check_equal, plan.to_json(), corpus, deep_plain_run, "none")


DEGREES = plan_of(4, (1, 2), (2, 1), (1, 4, "oases", 2, 1), fsdp=True, micro_batches=2)


@pytest.mark.long
def test_fsdp_of_segments_of_other_degrees(four_ranks, corpus, plain_run):
    four_ranks.run(check_equal, DEGREES.to_json(), corpus, plain_run, "none")


@pytest.mark.long
def test_fsdp_holds_a_share_of_the_weights(two_ranks, four_ranks, corpus, plain_run):
    whole = sum(tensor.numel() for tensor in plain_run[3].values())
    plan = plan_of(4, (4, 1), fsdp=True)
    assert [held for _, held in four_ranks.run(check_equal, plan.to_json(), corpus, plain_run, "none")] == [
        whole // 4
    ] * 4


def check_without_a_plan(data, expected):
    sizes = {name: getattr(MODEL, name) for name in ("hidden", "layers", "heads", "sequence")}
    trainer = Trainer(TrainConfig(**sizes, batch=16, sequence_parallel=True, **config_values(data)))
    assert "gather" in {op.kind.removeprefix("all_") for op in trainer.model.stack.segments[0].schedule}
    assert curve(trainer)[1] == pytest.approx(expected[1], rel=1e-10)


def test_a_run_without_a_plan_may_be_sequence_parallel(two_ranks, corpus, plain_run):
    two_ranks.run(check_without_a_plan, corpus, plain_run)


# --- checkpoints ---


def two_steps(text, data, path):
    plan = Plan.from_json(text)
    trainer = Trainer(config_for(plan, config_values(data)), plan=plan)
    trainer.step()
    trainer.step()
    trainer.save(path)


def goes_on(text, data, path, expected):
    plan = Plan.from_json(text)
    trainer = Trainer(config_for(plan, {**config_values(data), "resume": path}), plan=plan)
    assert trainer.steps_done == 2
    assert trainer.step() == pytest.approx(expected[1][2], rel=1e-5)
    assert trainer.validate() == pytest.approx(expected[4], rel=1e-5)
    trainer.close()


@pytest.mark.slow
def test_checkpoints_of_shards_go_on_under_any_plan(two_ranks, four_ranks, corpus, plain_run, tmp_path):
    path, sharded = str(tmp_path / "checkpoint"), together("tensor", "fsdp").to_json()
    four_ranks.run(two_steps, sharded, corpus, path)
    goes_on(plan_of(1, (4, 1)).to_json(), corpus, path, plain_run)
    two_ranks.run(goes_on, together("fsdp", "compile").to_json(), corpus, path, plain_run)
    four_ranks.run(goes_on, together("pipeline", "fsdp").to_json(), corpus, path, plain_run)
    four_ranks.run(goes_on, DEGREES.to_json(), corpus, path, plain_run)
    again = str(tmp_path / "again")
    four_ranks.run(two_steps, together("pipeline", "data").to_json(), corpus, again)
    four_ranks.run(goes_on, sharded, corpus, again, plain_run)


def check_behind(text, data, folder):
    """Written behind the training, and gone on from: the same losses to the bit."""
    plan, values = Plan.from_json(text), config_values(data)
    first = Trainer(config_for(plan, {**values, "checkpoint": folder, "checkpoint_every": 2}), plan=plan).train()
    path = f"{folder}/step-000002"
    second = Trainer(config_for(plan, {**values, "resume": path}), plan=plan).train()
    assert second["losses"] == first["losses"][2:]
    assert second["validation_loss"] == first["validation_loss"]


@pytest.mark.slow
def test_shards_are_saved_behind_the_training(four_ranks, corpus, tmp_path):
    four_ranks.run(check_behind, together("tensor", "fsdp").to_json(), corpus, str(tmp_path / "checkpoints"))


# --- what cannot be together ---


def refused(message, plan, **given):
    with pytest.raises(UsageError, match=message):
        Run(config_for(plan(), given), plan()).corpus()


def test_what_cannot_be_combined_is_refused_by_name(corpus):
    whole = together("data")
    refused(
        "fsdp includes zero; leave out zero",
        lambda: plan_of(2, (4, 1), zero=True, fsdp=True),
    )
    refused("fsdp needs data-parallel replicas, but tp is 2", lambda: plan_of(2, (4, 2), fsdp=True))
    refused(
        "does not divide over tp 1; leave out sequence_parallel",
        lambda: plan_of(1, (4, 1, "oases", 2, 0, True)),
    )
    odd = resized(MODEL, sequence=7)
    refused("sequence 7 does not divide over tp 2", lambda: plan_of(2, (4, 2, "oases", 2, 0, True), model=odd))
    refused("leave out --sequence-parallel", lambda: whole, sequence_parallel=True)
    refused("unknown compile 'nosuch'; known are none, ", lambda: whole, compile="nosuch")
    with pytest.raises(UsageError, match="a sequence of 128 does not divide by --tp 1"):
        Run.of(TrainConfig(sequence_parallel=True), 1)


# --- the covering array ---


def test_rows_cover_every_pair():
    factors = {"a": ("1", "2", "3"), "b": ("1", "2", "3", "4"), "c": ("1", "2"), "d": ("1", "2")}
    rows = covering(factors)
    assert len(rows) == 12  # as few as the two longest factors allow
    assert set().union(*map(pairs_in, rows)) == set(every_pair(factors))
    without = covering(factors, lambda row: (row.get("a"), row.get("c")) != ("1", "2"))
    left = set(every_pair(factors)) - set().union(*map(pairs_in, without))
    assert left == {frozenset({("a", "1"), ("c", "2")})}


@pytest.mark.slow
def test_the_array_of_plans_covers_every_pair():
    assert set().union(*map(pairs_in, pairs.rows())) == set(every_pair(pairs.FACTORS))
    for row in pairs.rows():
        plan = pairs.plan_of_row(row)
        Run(config_for(plan, pairs.options(2, None)), plan).corpus()


@pytest.mark.slow
def test_rows_of_the_array_train_like_one_process(corpus):
    """Three rows; `python pairs.py` runs them all."""
    expected = pairs.alone(3, corpus)
    chosen = [{"pipeline": "interleaved", "replicas": "fsdp"}, {"pipeline": "zb_h1"}, {"sequence": "parallel"}]
    with RankPool(8) as eight_ranks:
        for choices in chosen:
            row = next(row for row in pairs.rows() if {**row, **choices, "compile": "none"} == row)
            for losses in eight_ranks.run(pairs.run_row, row, 3, corpus):
                assert pairs.difference(losses, expected) < 1e-5
