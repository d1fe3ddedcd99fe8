"""Ranks as the command line starts them: results, a rank that dies in mid-step, a launcher of the wrong size."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oases import TrainConfig, Trainer
from oases.errors import UsageError
from oases.launch.ranks import RankOptions, run_ranks

HERE = Path(__file__).parent


def run_script(body, **environment):
    """Run Python in a process of its own that can import this module, as the ranks it spawns must.

    It has 120 seconds: no rank may wait for the 300 of a collective, or for one that sleeps for 600.
    """
    return subprocess.run(
        [sys.executable, "-c", f"import test_ranks as t\n{body}"],
        cwd=HERE, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def test_result_of_rank_zero():
    done = run_script("print(t.run_ranks(t.rank_and_size, (), t.RankOptions(2)))")
    assert done.stdout.strip() == "(0, 2)", done.stderr


def refuse():
    raise UsageError("steps 0 is too few")


def test_a_mistake_found_by_the_ranks_exits_with_2():
    done = run_script("t.run_ranks(t.refuse, (), t.RankOptions(2))")
    assert done.returncode == 2
    assert done.stderr.strip() == "oases: error: steps 0 is too few"


def stumble():
    raise KeyError("a bug")


def test_a_bug_shows_its_traceback():
    done = run_script("t.run_ranks(t.stumble, (), t.RankOptions(2))")
    assert done.returncode == 1
    assert "KeyError: 'a bug'" in done.stderr
    assert "oases: rank 0 failed:" in done.stderr or "oases: rank 1 failed:" in done.stderr


def dies_in_mid_step(victim):
    config = TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=1000)
    trainer = Trainer(config)
    if dist.get_rank() == victim:

        def kill(grad):
            if trainer.steps_done == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.model.stack.blocks[3].up.weight.register_hook(kill)
    trainer.train()


SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_dies_is_named_by_the_others(size):
    done = run_script(f"t.run_ranks(t.dies_in_mid_step, (1,), t.RankOptions({size}))")
    assert done.returncode == 1
    assert "oases: rank 1 ended with signal SIGKILL; the run is over" in done.stderr
    # The survivor next to it in the backward pass says what it waited for and who is missing.
    assert "waited for all_reduce of " in done.stderr, done.stderr
    assert "; rank 1 is gone" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def runs_out_of_memory(victim):
    """Every rank's error in a step in which one rank runs out of memory, and the loss of the next step."""
    trainer = Trainer(TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=1000))
    trainer.step()
    block = trainer.model.stack.blocks[3]
    combine = block.combine
    if dist.get_rank() == victim:
        block.combine = raise_out_of_memory
    said = ""
    try:
        trainer.step()
    except torch.OutOfMemoryError as error:
        said = str(error)
    block.combine = combine
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    return everyone, trainer.step()


def raise_out_of_memory(x, y):
    raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_runs_out_of_memory_is_named_by_all_and_training_goes_on(size):
    done = run_script(f"print(*t.run_ranks(t.runs_out_of_memory, (1,), t.RankOptions({size})))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 1 ran out of memory at C 3.") == size, done.stdout


def dawdles(seconds):
    trainer = Trainer(TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=1000))
    if dist.get_rank() == 1:

        def sleep(grad):
            if trainer.steps_done == 2:
                time.sleep(seconds)

        trainer.model.stack.blocks[3].up.weight.register_hook(sleep)
    trainer.train()


def test_a_collective_that_does_not_end_names_who_is_missing():
    """The watchdog: after the set time every rank ends, and says what it waited for, where, and for whom."""
    done = run_script("t.run_ranks(t.dawdles, (600,), t.RankOptions(2, timeout_seconds=8))")
    assert done.returncode == 1
    assert "rank 0 waited for all_reduce of " in done.stderr, done.stderr
    assert "bytes" in done.stderr
    assert "; rank 1 is missing: it has not come to it" in done.stderr, done.stderr
    assert "rank 1 was ended by the launcher" in done.stderr, done.stderr


def test_more_ranks_than_the_launcher_gives(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"--tp 4 needs 4 ranks, but the launcher gives 2; .* --nproc-per-node 4"):
        run_ranks(rank_and_size, (), RankOptions(4))


def tells_when_training(path):
    trainer = Trainer(TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=100_000))
    trainer.step()
    dist.barrier()
    Path(path).touch()
    trainer.train()


def test_an_interrupt_ends_the_run_in_one_line(tmp_path):
    ready = tmp_path / "ready"
    code = f"import test_ranks as t; t.run_ranks(t.tells_when_training, ({str(ready)!r},), t.RankOptions(2))"
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=HERE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not ready.exists():
        assert run.poll() is None
        time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    _, error = run.communicate(timeout=300)
    assert run.returncode == 130
    assert "oases: interrupted" in error
    assert "Traceback" not in error
