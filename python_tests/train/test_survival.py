"""Runs that are killed, told to end, or meet a bad loss: they go on with the same curve, or say why they do not."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kills
import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from oases import TrainConfig, Trainer
from oases.cli import main
from oases.errors import SAVED_EXIT_CODE, SavedExit, UsageError
from oases.launch import fork_server
from oases.launch.agents import RankFailedError
from oases.launch.ranks import _restart_or_exit
from oases_train.logs import StepLog, last_logged_step
from oases_train.plan import Run
from oases_train.step_check import LossError, StepCheck

CONFIG = TrainConfig(
    hidden=16, layers=2, heads=4, sequence=8, batch=16, steps=6, warmup=1, validation_batches=1, learning_rate=1e-2,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone(corpus):
    return trainer_of(corpus).train()["losses"]


def trainer_of(corpus, **changes):
    return Trainer(dataclasses.replace(CONFIG, data=str(corpus), **changes))


# --- killed ---

STEPS = 40


def losses_of_all(corpus, **options):
    """(step, loss) of a run of this group with the sizes of `kills`."""
    values = {name.replace("-", "_"): value for name, value in (kills.SIZES | options).items()}
    trainer = Trainer(TrainConfig(data=str(corpus), steps=STEPS, **values))
    first = trainer.steps_done + 1
    return list(enumerate(trainer.train()["losses"], start=first))


def goes_on(corpus, folder, log):
    return losses_of_all(corpus, checkpoint=folder, resume="auto", step_log=log)


@pytest.fixture(scope="module")
def unbroken(two_ranks, corpus):
    """Losses of a run of two ranks that nobody disturbs."""
    return two_ranks.run(losses_of_all, corpus)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "kinds", [("checkpoint",), pytest.param(("step", "checkpoint", "start"), marks=pytest.mark.slow)]
)
def test_killed_ranks_go_on_equal_to_the_bit(corpus, unbroken, tmp_path, kinds):
    code, said, log, hits = kills.killed_run(corpus, tmp_path, kinds=kinds, seed=3, steps=STEPS)
    assert code == 0, said
    assert hits >= 1
    assert said.count("ended with signal SIGKILL; restart ") == hits
    assert kills.losses_of(log) == unbroken  # each step once, in order
    assert not list((tmp_path / "killed").glob(".*"))


def as_a_script(words):
    """Run `oases` on a rank of torchrun."""
    fork_server.die_with_parent()
    main(words)


@pytest.mark.slow
def test_torchrun_restarts_go_on(corpus, unbroken, tmp_path):
    """By the API under torchrun, whose store outlives a restart; its command is tested by `test_torchrun`."""
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    words = kills.arguments(corpus, tp=2, steps=STEPS, checkpoint=folder, checkpoint_every=4, step_log=log)
    before = set(kills.ranks_of(os.getpid()))

    def kill_the_last():
        while not any(line["step"] >= 6 for line in kills.lines_of(log)):
            time.sleep(0.01)
        os.kill(max(set(kills.ranks_of(os.getpid())) - before), signal.SIGKILL)

    config = LaunchConfig(
        1, 1, 2, run_id="test", rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
        max_restarts=1, start_method=fork_server.start(), monitor_interval=0.1,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_the_last)
        elastic_launch(config, fork_server.as_started_by)(fork_server.Launcher(), as_a_script, words)
        killed.result(timeout=60)
    assert kills.losses_of(log) == unbroken


def children_of(parent):
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.slow
def test_torchrun(corpus, unbroken, tmp_path):
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    words = kills.command(corpus, tp=2, steps=STEPS, checkpoint=folder, checkpoint_every=4, step_log=log)[1:]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    run = subprocess.Popen([*launcher, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not any(line["step"] >= 6 for line in kills.lines_of(log)):
        assert run.poll() is None
        time.sleep(0.01)
    os.kill(children_of(run.pid)[-1], signal.SIGKILL)
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert kills.losses_of(log) == unbroken


@pytest.mark.parametrize(("code", "told", "exits"), [(2, 0, 2), (75, 75, 75), (1, 75, 75)])
def test_what_no_restart_can_mend_is_not_started_again(code, told, exits):
    with pytest.raises(SystemExit) as caught:
        _restart_or_exit(RankFailedError("rank 0", code), told, 0, 3)
    assert caught.value.code == exits


def test_restarts_are_counted(capsys):
    _restart_or_exit(RankFailedError("rank 1", -9), 0, 1, 2)
    assert capsys.readouterr().err == "oases: rank 1 ended with signal SIGKILL; restart 2 of 2\n"
    with pytest.raises(SystemExit) as caught:
        _restart_or_exit(RankFailedError("rank 1", -9), 0, 2, 2)
    assert caught.value.code == 1
    assert "the run is over" in capsys.readouterr().err


# --- told to end ---


@pytest.mark.long
def test_sigterm_saves_and_the_run_goes_on(two_ranks, corpus, unbroken, tmp_path):
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    words = kills.arguments(corpus, tp=2, steps=STEPS, checkpoint=folder, resume="auto", step_log=log, max_restarts=2)

    def end(run):
        if kills.wait_until(lambda: len(kills.lines_of(log)) >= 1, run):
            os.kill(run.pid, signal.SIGTERM)

    code = kills.Run(words, tmp_path / "stderr").call(end)
    said = (tmp_path / "stderr").read_text()
    assert code == SAVED_EXIT_CODE, said
    steps = len(kills.lines_of(log))
    assert steps < STEPS
    assert said == f"oases: ended by SIGTERM after step {steps}, which is saved in {str(folder)!r}\n"
    assert [path.name for path in folder.iterdir()] == [f"step-{steps:06d}"]
    two_ranks.run(goes_on, corpus, str(folder), str(log))
    assert kills.losses_of(log) == unbroken


def told_to_end(corpus, folder, victim):
    """The steps after which every rank saves and leaves when one of them is told to end in its third step."""
    trainer = trainer_of(corpus, checkpoint=folder)
    before = signal.getsignal(signal.SIGTERM)

    def on_step(report):
        if report.step == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SavedExit) as ended:
        trainer.train(on_step)
    assert ended.value.code == SAVED_EXIT_CODE
    assert signal.getsignal(signal.SIGTERM) is before
    return trainer.steps_done, ended.value.message


@pytest.mark.long
def test_all_ranks_end_when_one_is_told_to(two_ranks, corpus, alone, tmp_path):
    folder = tmp_path / "checkpoints"
    message = f"ended by SIGTERM after step 3, which is saved in {str(folder)!r}"
    assert two_ranks.run(told_to_end, corpus, str(folder), 1) == [(3, message)] * 2
    losses = trainer_of(corpus, resume=str(folder)).train()["losses"]
    assert losses == pytest.approx(alone[3:], rel=1e-4)


# --- a bad loss ---


def with_a_bad_gradient(corpus, policy, value):
    """A run in which one rank's gradient is bad in step 2: what it says, and whether the weights are finite."""
    trainer = trainer_of(corpus, bad_loss=policy)
    weight = trainer.model.stack.blocks[1].up.weight

    def spoil(grad):
        return torch.full_like(grad, value) if trainer.steps_done == 2 and dist.get_rank() == 1 else grad

    weight.register_hook(spoil)
    said, losses = "", []
    try:
        losses = trainer.train()["losses"]
    except LossError as error:
        said = str(error)
    finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    return said, trainer.steps_done, trainer.updates, trainer.step_check.skipped, losses, finite


@pytest.mark.long
def test_a_bad_gradient_on_one_rank_is_dealt_with_by_all(two_ranks, corpus, alone):
    stopped = two_ranks.run(with_a_bad_gradient, corpus, "stop", float("nan"))
    assert stopped[0] == stopped[1]
    said, done, updates, _, _, finite = stopped[0]
    assert said.startswith("step 2: the norm of the gradient is nan; lower --learning-rate")
    assert (done, updates, finite) == (2, 2, True)
    skipped = two_ranks.run(with_a_bad_gradient, corpus, "skip", float("inf"))
    assert skipped[0] == skipped[1]
    _, done, updates, steps, losses, finite = skipped[0]
    assert (done, updates, steps, finite) == (6, 5, [2], True)
    assert losses[:3] == pytest.approx(alone[:3], rel=1e-4)
    assert not two_ranks.run(with_a_bad_gradient, corpus, "off", float("nan"))[0][-1]


def test_a_skipped_step_is_logged_and_stays_skipped(corpus, tmp_path):
    """A run that goes on from behind a skipped step has Adam's count of updates, not of steps."""
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"

    def spoiled(**changes):
        trainer = trainer_of(corpus, bad_loss="skip", step_log=str(log), **changes)

        def spoil(grad):
            return torch.full_like(grad, float("nan")) if trainer.steps_done == 2 else grad

        trainer.model.norm.weight.register_hook(spoil)
        with pytest.warns(UserWarning, match="step 2 is skipped: the norm of the gradient is nan"):
            return trainer.train()["losses"]

    whole = spoiled(checkpoint=str(folder), checkpoint_every=4)
    assert [line["skipped"] for line in kills.lines_of(log)] == [False, False, True, False, False, False]
    again = trainer_of(corpus, resume=str(folder / "step-000004"), bad_loss="skip")
    assert again.updates == 3
    assert again.train()["losses"] == whole[4:]


def test_a_loss_that_is_not_finite():
    check = StepCheck("skip")
    assert check.accepts(9.0, 1.0, 0, None, CPU)
    with pytest.warns(UserWarning, match="step 1 is skipped: the loss is inf"):
        assert not check.accepts(float("inf"), 1.0, 1, None, CPU)
    with pytest.raises(LossError, match="step 2: the loss is nan"):
        StepCheck("stop").accepts(float("nan"), 1.0, 2, None, CPU)
    assert StepCheck("off").accepts(float("nan"), 1.0, 3, None, CPU)


# --- the log ---


@pytest.mark.long
def test_a_log_goes_on_without_a_step_twice(corpus, alone, tmp_path):
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    result = trainer_of(corpus, checkpoint=str(folder), checkpoint_every=2, step_log=str(log)).train()
    lines = kills.lines_of(log)
    assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(result["losses"], start=1))
    fields = {"step", "loss", "seconds", "learning_rate", "tokens_per_second", "memory_bytes"}
    assert all(fields <= line.keys() for line in lines)
    assert lines[0]["learning_rate"] == CONFIG.learning_rate
    with log.open("a") as file:
        file.write('{"step": 7, "lo')  # killed in the midst of it
    assert last_logged_step(log) == 6
    trainer_of(corpus, resume=str(folder / "step-000002"), step_log=str(log)).train()
    assert kills.losses_of(log) == list(enumerate(alone, start=1))


def test_a_number_that_is_none_is_null(tmp_path):
    with StepLog(tmp_path / "log", 0) as log:
        log.write(step=1, loss=float("nan"))
    assert json.loads((tmp_path / "log").read_text()) == {"step": 1, "loss": None}


def test_a_log_of_another_run_is_not_overwritten(corpus, tmp_path):
    log = tmp_path / "log.jsonl"
    trainer_of(corpus, step_log=str(log), steps=1).train()
    with pytest.raises(UsageError, match="holds the steps of another run; give a new file"):
        Run.of(dataclasses.replace(CONFIG, data=str(corpus), step_log=str(log)), 1).corpus()
    log.write_text("precious\n")
    with pytest.raises(UsageError, match="line 1 is not JSON"):
        Run.of(dataclasses.replace(CONFIG, data=str(corpus), step_log=str(log)), 1).corpus()
    assert log.read_text() == "precious\n"


# --- mistakes ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint-every", "5"], "checkpoint_every 5 needs a checkpoint folder; give --checkpoint"),
        (["--resume", "auto"], "resume 'auto' needs a checkpoint folder"),
        (["--keep", "-1"], "keep must be at least 0"),
        (["--bad-loss", "ignore"], "argument --bad-loss: invalid choice: 'ignore'"),
        (["--max-restarts", "-1"], "--max-restarts must be at least 0"),
        (["--step-log", "/dev/null/log"], "a file is in the way"),
    ],
)
def test_mistakes_end_the_command(capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        main(["train", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
