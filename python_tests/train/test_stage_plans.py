"""Plans of several stages on real ranks against one process on the whole batch: losses, gradients, weights."""

import json

import pytest
from plan_runs import check_plan, even, staged

from oases import Trainer
from oases.cli import main
from oases.errors import UsageError
from oases.testing import RankPool
from oases_train.config import config_for
from oases_train.plan import Run

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
    "zb v 4": even(4, 4, 1, "sync", "some", "zb_v", 8),
    "zb v 2 tp 2": even(4, 2, 2, "oases", "none", "zb_v"),
    "zb v 2 dp 2": even(4, 2, 1, "sync", "full", "zb_v", 4, zero=True),
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


@pytest.mark.long
@pytest.mark.few(6)
@pytest.mark.parametrize("name", COVER)
def test_stages_train_like_one_process(four_ranks, corpus, deep_plain_run, name):
    held = four_ranks.run(check_plan, COVER[name].to_json(), corpus, deep_plain_run)
    assert set().union(*held) == set(deep_plain_run[2])


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


@pytest.mark.slow
def test_eight_ranks_train_like_one_process(corpus, deep_plain_run):
    with RankPool(8) as eight_ranks:
        eight_ranks.run(check_plan, EIGHT.to_json(), corpus, deep_plain_run)
        deep = even(8, 4, 2, "sync", "full", "pre_recompute", 8)
        eight_ranks.run(check_plan, deep.to_json(), corpus, deep_plain_run)


@pytest.mark.long
def test_the_command_line_executes_stages(ranks_at_hand, corpus, deep_plain_run, tmp_path):
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text(COVER["shifted 2 tp 2"].to_json())
    options = ["--steps", "3", "--warmup", "1", "--validation-batches", "1", "--clip", "0.5"]
    main(["train", "--plan", str(plan), "--data", corpus, "--json", str(out), "--learning-rate", "1e-2", *options])
    result = json.loads(out.read_text())
    assert result["losses"] == pytest.approx(deep_plain_run[1], rel=1e-5)
    assert result["validation_loss"] == pytest.approx(deep_plain_run[4], rel=1e-5)
    labels = {row["where"] for row in result["overlap"]["others"]}
    assert {"activations, stage 0 to 1", "gradients, stage 1 to 0"} <= labels
