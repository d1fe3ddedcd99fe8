"""Runs with pipeline stages that are killed, told to end, fail, meet a bad loss or a full disk, as one."""

import errno
import json
import os
import shutil
import signal
from unittest import mock

import kills
import pytest
import torch.distributed as dist
from plan_runs import DEEP, even, plan_of

from oases import Trainer
from oases.checkpoint import integrity, storage
from oases.checkpoint.metadata import FORMAT
from oases.cli import main
from oases.errors import SAVED_EXIT_CODE, SavedExit
from oases.plans.plan import Plan
from oases_train.config import config_for
from oases_train.step_check import LossError

TP = even(4, 2, 2, "oases", "some", "shifted_critical_path").to_json()
DP = even(4, 2, 1, "sync", "none", "one_f_one_b", 2, zero=True).to_json()
STEPS = 6


def trainer_of(text, data, **changes):
    plan = Plan.from_json(text)
    values = {"steps": STEPS, "warmup": 1, "validation_batches": 1, "learning_rate": 1e-2, "data": data}
    return Trainer(config_for(plan, values | changes), plan=plan)


def curve(text, data, **changes):
    trainer = trainer_of(text, data, **changes)
    losses = trainer.train()["losses"]
    trainer.close()
    return losses


# --- killed ---


def losses_of_all(text, data, steps):
    plan = Plan.from_json(text)
    values = {"steps": steps, "warmup": kills.SIZES["warmup"], "validation_batches": 1, "data": data}
    trainer = Trainer(config_for(plan, values), plan=plan)
    losses = trainer.train()["losses"]
    trainer.close()
    return list(enumerate(losses, start=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "plan", "kinds"),
    [
        ("two_ranks", kills.PAIR, ("step",)),
        pytest.param("four_ranks", kills.STAGES, ("step", "checkpoint"), marks=pytest.mark.slow),
    ],
    ids=["two ranks", "four ranks"],
)
def test_killed_ranks_of_stages_go_on_equal_to_the_bit(request, corpus, tmp_path, pool, plan, kinds):
    steps, path = 24, kills.write_plan(tmp_path / "plan.json", plan)
    unbroken = request.getfixturevalue(pool).run(losses_of_all, plan.to_json(), corpus, steps)[0]
    code, said, log, hits = kills.killed_run(corpus, tmp_path, kinds=kinds, seed=1, steps=steps, plan=path)
    assert code == 0, said
    assert hits >= 1
    assert said.count("ended with signal SIGKILL; restart ") == hits
    assert kills.losses_of(log) == unbroken  # each step once, in order


# --- a step that fails ---


class FaultError(Exception):
    """Error raised by an op of the tests."""


def fails_in_the_third_step(text, data, folder, victim, where):
    """Return the errors of every rank when one fails, of the next step, and the losses of a new trainer."""
    trainer = trainer_of(text, data, checkpoint=folder, checkpoint_every=1)

    def fault(*arguments):
        raise FaultError("a bug")

    def on_step(report):
        if report.step == 2 and dist.get_rank() == victim:
            owner, name = (trainer.model, "run_part") if where == "forward" else (trainer.optimizer, "step")
            setattr(owner, name, fault)

    said = []
    for attempt in (lambda: trainer.train(on_step), trainer.step):
        try:
            attempt()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    trainer.close()
    return said, curve(text, data, checkpoint=folder, resume="auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "victim", "where"),
    [
        pytest.param(TP, 0, "forward", marks=pytest.mark.slow),
        pytest.param(DP, 3, "forward", marks=pytest.mark.slow),
        pytest.param(DP, 0, "forward", marks=pytest.mark.slow),
        (TP, 3, "optimizer"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(four_ranks, corpus, tmp_path, text, victim, where):
    whole = four_ranks.run(curve, text, corpus)[0]
    results = four_ranks.run(fails_in_the_third_step, text, corpus, str(tmp_path / "c"), victim, where)
    for rank, ((first, again), losses) in enumerate(results):
        assert first == "FaultError: a bug" if rank == victim else "Error" in first
        assert again.startswith("RuntimeError: step ")
        assert "has failed" in again
        assert "make a new Trainer on all ranks, with resume='auto'" in again
        assert losses == whole[2:]
    told = [said[0] for said, _ in results]
    assert any("FaultError: a bug" in text for rank, text in enumerate(told) if rank != victim)


# --- told to end, a bad loss, a full disk ---


def told_to_end(text, data, folder, victim):
    trainer = trainer_of(text, data, checkpoint=folder)

    def on_step(report):
        if report.step == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SavedExit) as ended:
        trainer.train(on_step)
    trainer.close()
    return ended.value.code, trainer.steps_done


@pytest.mark.slow
def test_all_stages_end_when_one_rank_is_told_to(four_ranks, corpus, tmp_path):
    folder = str(tmp_path / "c")
    assert four_ranks.run(told_to_end, TP, corpus, folder, 3) == [(SAVED_EXIT_CODE, 3)] * 4
    whole = four_ranks.run(curve, TP, corpus)[0]
    assert four_ranks.run(goes_on, TP, corpus, folder)[0] == whole[3:]


def goes_on(text, data, folder):
    return curve(text, data, checkpoint=folder, resume="auto")


def with_a_bad_loss(text, data, policy):
    """A run whose loss is no number in step 2, which the last stage alone computes."""
    trainer = trainer_of(text, data, bad_loss=policy)
    whole = trainer.model.run_part

    def spoiled(part, *arguments):
        y = whole(part, *arguments)
        return y * float("nan") if y.dim() == 0 and trainer.steps_done == 2 else y

    trainer.model.run_part = spoiled
    said, losses = "", []
    try:
        losses = trainer.train()["losses"]
    except LossError as error:
        said = str(error)
    finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    trainer.close()
    return said, trainer.updates, trainer.step_check.skipped, len(losses), finite


@pytest.mark.long
def test_a_bad_loss_of_the_last_stage_is_dealt_with_by_all(four_ranks, corpus):
    stopped = four_ranks.run(with_a_bad_loss, TP, corpus, "stop")
    assert all(one == stopped[0] for one in stopped)
    assert stopped[0][0].startswith("step 2: the loss is nan; lower --learning-rate")
    assert stopped[0][1:] == (2, [], 0, True)
    assert four_ranks.run(with_a_bad_loss, TP, corpus, "skip") == [("", STEPS - 1, [2], STEPS, True)] * 4


def finds_the_disk_full(text, data, folder, victim):
    """The failures of a run whose second checkpoint finds the disk full on one rank, and what its folder then has."""
    found, calls = integrity.checksums, []

    def checksums(files):
        calls.append(1)
        if len(calls) == 2 and dist.get_rank() == victim:
            raise OSError(errno.ENOSPC, "No space left on device")
        return found(files)

    trainer = trainer_of(text, data, checkpoint=folder, checkpoint_every=2)
    with mock.patch.object(storage, "checksums", checksums):
        failed = trainer.train()["checkpoints"]["failed"]
    trainer.close()
    dist.barrier()  # the first rank has removed the lock
    return failed, sorted(os.listdir(folder))


@pytest.mark.slow
def test_a_full_disk_of_the_last_stage_loses_nothing(four_ranks, corpus, tmp_path):
    for failed, left in four_ranks.run(finds_the_disk_full, TP, corpus, str(tmp_path / "c"), 2):
        assert "step-000004' could not be written: rank 2: [Errno 28] No space left on device" in failed[0]
        assert left == ["step-000002", "step-000006"]


# --- mistakes, before any rank starts ---


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """A checkpoint of one process."""
    path = tmp_path_factory.mktemp("saved") / "c"
    trainer_of(plan_of(1, (8, 1), model=DEEP).to_json(), corpus).save(str(path))
    return path


def rewritten(path, **changes):
    record = path / "checkpoint.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))
    integrity.write_checksums(
        path, integrity.checksums(file for file in path.iterdir() if file.name != integrity.CHECKSUMS)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 1}, f"is of format {FORMAT + 1}, this oases reads formats up to"),
        ({"sizes": {"hidden": 32, "layers": 4}}, "does not fit: hidden is 32 there and 16 here"),
        ({"sizes": 7}, "is corrupt: its checkpoint.json cannot be read"),
        ({"nonsense": 1}, "is corrupt: its checkpoint.json cannot be read"),
    ],
)
def test_no_rank_starts_on_a_checkpoint_that_does_not_fit(corpus, saved, tmp_path, capsys, changes, message):
    path = shutil.copytree(saved, tmp_path / "c")
    plan = kills.write_plan(tmp_path / "plan.json", Plan.from_json(TP))
    rewritten(path, **changes)
    with mock.patch("oases.launch.ranks.run_ranks") as started, pytest.raises(SystemExit) as caught:
        main(["train", "--plan", str(plan), "--data", corpus, "--resume", str(path)])
    assert caught.value.code == 2
    assert not started.called
    assert message in capsys.readouterr().err


def test_no_rank_starts_on_a_plan_of_another_model(corpus, saved, tmp_path, capsys):
    plan = kills.write_plan(tmp_path / "plan.json")
    with mock.patch("oases.launch.ranks.run_ranks") as started, pytest.raises(SystemExit):
        main(["train", "--plan", str(plan), "--data", corpus, "--hidden", "128"])
    assert "plan: hidden is 64 there and 128 here; leave out --hidden" in capsys.readouterr().err
    with mock.patch("oases.launch.ranks.run_ranks"), pytest.raises(SystemExit):
        main(["train", "--plan", str(plan), "--data", corpus, "--resume", str(saved)])
    assert "does not fit: hidden is 16 there and 64 here" in capsys.readouterr().err
    assert not started.called
