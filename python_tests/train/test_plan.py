"""Plans executed on real ranks against one process on the whole batch; bad plans refused before any rank starts."""

import json
import pickle
import sys

import pytest
from plan_runs import MODEL, PLANS, check_plan, config_of, curve, plan_of, stored_once

from oases import TrainConfig, Trainer
from oases.cli import main
from oases.distributed.optimizer import state_of
from oases.errors import UsageError
from oases.plans.gpt import resized
from oases.plans.plan import Plan
from oases_train import plan as plans
from oases_train.config import config_for
from oases_train.plan import Run


@pytest.mark.parametrize("name", PLANS[2])
def test_two_ranks_train_like_one(two_ranks, corpus, plain_run, name):
    two_ranks.run(check_plan, PLANS[2][name].to_json(), corpus, plain_run)


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANS[4])
def test_four_ranks_train_like_one(four_ranks, corpus, plain_run, name):
    four_ranks.run(check_plan, PLANS[4][name].to_json(), corpus, plain_run)


def test_one_rank_needs_no_group(corpus, plain_run):
    for plan in (plan_of(1, (4, 1)), plan_of(1, (2, 1), (2, 1, "oases", 2, 1), micro_batches=4, zero=True)):
        check_plan_alone = Trainer(config_of(corpus), plan=plan)
        assert curve(check_plan_alone)[1] == pytest.approx(plain_run[1], rel=1e-10)


def resumed(text, corpus, path, expected):
    """Two steps of one plan, saved; the third of another goes on from there."""
    plan = None if text is None else Plan.from_json(text)
    trainer = Trainer(config_of(corpus, resume=path), plan=plan)
    assert trainer.steps_done == 2
    assert trainer.step() == pytest.approx(expected[1][2], rel=1e-5)
    assert trainer.validate() == pytest.approx(expected[4], rel=1e-5)


def two_steps(text, corpus, path):
    trainer = Trainer(config_of(corpus), plan=Plan.from_json(text))
    trainer.step()
    trainer.step()
    trainer.save(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param("4 -> 2", marks=pytest.mark.slow), "1 -> 4 -> 2", pytest.param("2 -> 4", marks=pytest.mark.slow)],
)
def test_a_checkpoint_goes_on_under_any_plan(two_ranks, four_ranks, corpus, plain_run, tmp_path, name):
    path = str(tmp_path / "checkpoint")
    four_ranks.run(two_steps, PLANS[4][name].to_json(), corpus, path)
    four_ranks.run(resumed, PLANS[4][name].to_json(), corpus, path, plain_run)
    four_ranks.run(resumed, PLANS[4]["1 -> 4 -> 2"].to_json(), corpus, path, plain_run)
    two_ranks.run(resumed, None, corpus, path, plain_run)
    resumed(None, corpus, path, plain_run)
    assert stored_once(path)


def shard(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def optimizer_numbers(text, corpus):
    trainer = Trainer(config_of(corpus), plan=Plan.from_json(text))
    trainer.step()
    parameters = list(trainer.model.parameters())
    return sum(shard(p).numel() for p in parameters if state_of(trainer.optimizer, p)), sum(
        p.numel() for p in parameters
    )


@pytest.mark.long
def test_zero_keeps_a_share_of_the_state(four_ranks, corpus):
    plan = plan_of(4, (4, 1), zero=True)
    shares = four_ranks.run(optimizer_numbers, plan.to_json(), corpus)
    assert sum(mine for mine, _ in shares) == shares[0][1]
    assert max(mine for mine, _ in shares) < shares[0][1] / 2


@pytest.mark.long
def test_the_command_line_executes_a_plan(ranks_at_hand, corpus, plain_run, tmp_path, capsys):
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text(PLANS[4]["1 -> 4 -> 2"].to_json())
    options = ["--steps", "3", "--warmup", "1", "--validation-batches", "1", "--clip", "0.5"]
    main(["train", "--plan", str(plan), "--data", corpus, "--json", str(out), "--learning-rate", "1e-2", *options])
    said = capsys.readouterr().out
    assert "1 blocks tp 1 x dp 4" in said
    assert "the plan has no prediction to compare with the measured step" in said
    result = json.loads(out.read_text())
    assert result["losses"] == pytest.approx(plain_run[1], rel=1e-5)
    assert result["validation_loss"] == pytest.approx(plain_run[4], rel=1e-5)
    assert result["plan"]["world"] == 4
    assert result["prediction"] is None
    labels = {row["where"] for row in result["overlap"]["others"]}
    assert {"reshard tp 1 to 4", "reshard tp 4 to 2, backward", "block 3, sharded gradients"} <= labels


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden": 32}, "hidden is 16 there and 32 here; leave out --hidden"),
        ({"layers": 3}, "layers is 2 there and 3 here"),
        ({"heads": 2}, "heads is 4 there and 2 here"),
        ({"sequence": 16}, "sequence is 8 there and 16 here"),
        ({"batch": 8}, "batch is 16 there and 8 here"),
        ({"schedule": "sync"}, "leave out --schedule"),
    ],
)
def test_what_the_plan_says_otherwise_is_named(given, message):
    with pytest.raises(UsageError, match=message):
        config_for(plan_of(4, (4, 2)), given)
    assert config_for(plan_of(4, (4, 2)), {"hidden": 16, "steps": 7}).steps == 7


def test_a_run_is_checked_once(corpus, monkeypatch, tmp_path):
    calls = []
    for name in ("check", "require_fit"):
        made = getattr(plans, name)
        monkeypatch.setattr(plans, name, lambda *given, made=made, name=name: calls.append(name) or made(*given))
    Trainer(TrainConfig(hidden=16, layers=2, heads=4, sequence=8, batch=4, data=corpus))
    assert sorted(calls) == ["check", "require_fit"]
    file = tmp_path / "plan.json"
    file.write_text(plan_of(1, (4, 1)).to_json())
    for given in (["--plan", str(file)], ["--hidden", "16", "--layers", "2", "--heads", "4", "--tp", "1"]):
        calls.clear()
        arguments = ["train", *given, "--data", corpus, "--steps", "1", "--validation-batches", "1"]
        found = {}
        monkeypatch.setattr(
            "oases.launch.ranks.run_ranks",
            lambda function, given, ranks, found=found: sys.exit(found.update(run=given[0])),
        )
        with pytest.raises(SystemExit):
            main(arguments)
        sent = pickle.loads(pickle.dumps(found["run"]))  # as to a rank
        Trainer(sent)
        assert sorted(calls) == ["check", "require_fit"]


def refused(plan, message, error=UsageError):
    with pytest.raises(error, match=message):
        Run(config_for(plan, {}), plan).corpus()


def test_plans_that_cannot_be_executed_are_refused():
    twelve = resized(MODEL, hidden=48, heads=12, vocabulary=264)
    nested = plan_of(12, (2, 2), (2, 3), model=twelve, global_batch=48)
    refused(nested, "tp 2 and tp 3 do not nest")
    with pytest.raises(UsageError, match="recomputed_layers must be from 0 to the 2 layers"):
        plan_of(4, (4, 2, "oases", 2, 5))
    half = plan_of(4, (4, 2), model=resized(MODEL, dtype="bfloat16"))
    assert config_for(half, {}).precision == "bfloat16"
    with pytest.raises(UsageError, match="computes in bfloat16, training here in float32; leave out --precision"):
        config_for(half, {"precision": "float32"})
    refused(plan_of(4, (4, 2), model=resized(MODEL, vocabulary=128)), "vocabulary of 128 is too small")
    with pytest.raises(UsageError, match="for 4 ranks, the run has 1"):
        Trainer(config_for(plan_of(4, (4, 2)), {}), plan=plan_of(4, (4, 2)))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "cannot be read: No such file"),
        ("{", [], "not JSON"),
        (plan_of(4, (4, 2)).to_json(), ["--tp", "2"], "leave out --tp 2"),
        (plan_of(4, (4, 2)).to_json(), ["--dp", "2"], "leave out --dp 2"),
        (plan_of(4, (4, 2)).to_json(), ["--pp", "1"], "leave out --pp 1"),
        (plan_of(4, (4, 2)).to_json(), ["--hidden", "512"], "hidden is 16 there and 512 here"),
        (
            plan_of(4, (4, 2)).to_json(),
            ["--backend", "sim:alpha=1us,bandwidth=1gbit,single_process"],
            "a plan needs all its ranks",
        ),
    ],
)
def test_bad_plans_end_the_command(tmp_path, capsys, text, options, message):
    plan = tmp_path / "plan.json"
    if text is not None:
        plan.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["train", "--plan", str(plan), *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_launcher_with_other_ranks_is_refused(tmp_path, capsys, monkeypatch):
    plan = tmp_path / "plan.json"
    plan.write_text(plan_of(4, (4, 2)).to_json())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        main(["train", "--plan", str(plan)])
    assert "needs 4 ranks, but the launcher gives 2" in capsys.readouterr().err
