"""Copies of the state in memory: ranks that are killed go on from them, equal to the bit, without a checkpoint."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import kills
import pytest
import torch
import torch.distributed as dist
from marked_processes import wait_until_gone, with_mark

from oases import TrainConfig, Trainer
from oases.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory is Linux's")
CONFIG = TrainConfig(
    hidden=16, layers=2, heads=4, sequence=8, batch=16, steps=6, warmup=1, validation_batches=1, learning_rate=1e-2,
)  # fmt: skip
SHAPES = {
    "tp 2": {"degrees": {"tensor": 2}},
    "dp 2": {"degrees": {"data": 2, "tensor": 1}},
    "dp 2, ZeRO-2, bfloat16": {"degrees": {"data": 2, "tensor": 1}, "zero": True, "precision": "bfloat16"},
    "dp 2, FSDP": {"degrees": {"data": 2, "tensor": 1}, "fsdp": True},
    "pp 2": {"degrees": {"pipeline": 2, "tensor": 1}, "micro_batches": 2},
    "experts": {"degrees": {"data": 2, "tensor": 1}, "experts": 4, "expert_hidden": 16, "placement": "none",
                "bias_update_rate": 0.01},
}  # fmt: skip


@contextlib.contextmanager
def memory(place=None):
    """Memory of this process as a launcher of one rank would keep it, or at another place; yields the place."""
    descriptors = [os.memfd_create("oases") for _ in range(2)]
    os.environ["OASES_MEMORY"] = place = place or f"{os.getpid()}:{descriptors[0]},{descriptors[1]}"
    try:
        yield place
    finally:
        os.environ.pop("OASES_MEMORY", None)
        for descriptor in descriptors:
            os.close(descriptor)


def trainer_of(corpus, folder, **changes):
    return Trainer(dataclasses.replace(CONFIG, data=str(corpus), checkpoint=folder, memory_every=1, **changes))


def steps_of(trainer, steps):
    losses = []
    for _ in range(steps):
        losses.append(trainer.step())
        trainer.remember()
    return losses


def bits_of(trainer):
    parts = trainer.memory._state()
    return {name: part.clone() for name, part in parts.items()}


def restored(corpus, folder, shape, where):
    """Go on from the third step; returns (equal to the bit, step, losses there, losses of the undisturbed run).

    where: "own", memory of each rank; "replica": rank 1 has lost its memory; "swapped": ranks have changed places.
    """
    torch.manual_seed(0)  # part of the state, and other tests may have left the ranks with others
    with memory() as mine:
        trainer = trainer_of(corpus, folder, **SHAPES[shape])
        steps_of(trainer, 3)
        before = bits_of(trainer)
        places = [mine] * dist.get_world_size()
        dist.all_gather_object(places, mine)
        expected = [trainer.step() for _ in range(3)]
        trainer.close()
        place = places[1 - dist.get_rank()] if where == "swapped" else mine
        if where == "replica" and dist.get_rank() == 1:
            place = None
        with memory(place):
            again = trainer_of(corpus, folder, **SHAPES[shape])
            step, after = again.steps_done, bits_of(again)
            assert where != "own" or again.resumed_from_memory
            losses = [again.step() for _ in range(3)]
            again.close()
    same = before.keys() == after.keys() and all(torch.equal(part, after[name]) for name, part in before.items())
    return same, step, losses, expected


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_ranks_go_on_from_their_own_memory(two_ranks, corpus, tmp_path, shape):
    for same, step, losses, expected in two_ranks.run(restored, corpus, str(tmp_path / "run"), shape, "own"):
        assert (same, step) == (True, 3)
        assert losses == expected


@pytest.mark.parametrize(("shape", "where"), [("dp 2", "replica"), ("tp 2", "swapped"), ("pp 2", "swapped")])
def test_a_rank_gets_the_state_from_another(two_ranks, corpus, tmp_path, shape, where):
    for same, step, losses, expected in two_ranks.run(restored, corpus, str(tmp_path / "run"), shape, where):
        assert (same, step) == (True, 3)
        assert losses == expected


@pytest.mark.long
@pytest.mark.parametrize("shape", ["tp 2", "dp 2, FSDP"])
def test_a_shard_that_no_rank_has_is_not_restored(two_ranks, corpus, tmp_path, shape):
    assert [found[1] for found in two_ranks.run(restored, corpus, str(tmp_path), shape, "replica")] == [0, 0]


def test_a_copy_that_was_cut_off_leaves_the_one_before(corpus, tmp_path, monkeypatch):
    with memory():
        trainer = trainer_of(corpus, str(tmp_path))
        steps_of(trainer, 2)
        expected = bits_of(trainer)
        trainer.step()

        def cut(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("oases.checkpoint.memory._File.write_text", cut)
        with pytest.raises(KeyboardInterrupt):
            trainer.remember()
        trainer.unlock()
        monkeypatch.undo()
        again = trainer_of(corpus, str(tmp_path))
        assert again.steps_done == 2
        assert all(torch.equal(part, expected[name]) for name, part in bits_of(again).items())


def resumed_twice(corpus, folder, options):
    """Losses of a run, and those of one that goes on from a checkpoint, then from memory of later steps."""
    steps = dataclasses.replace(CONFIG, data=str(corpus), checkpoint=folder, memory_every=1, keep=0, **options)
    with memory():
        trainer = Trainer(steps)
        losses = trainer.train()["losses"]
        trainer.close()
    with memory():
        first = Trainer(dataclasses.replace(steps, resume=f"{folder}/step-000002", checkpoint=f"{folder}-again"))
        steps_of(first, 2)
        first.close()
        second = Trainer(dataclasses.replace(steps, checkpoint=f"{folder}-again", resume="auto"))
        assert second.resumed_from_memory
        assert second.steps_done == 4
        again = [second.step() for _ in range(2)]
        second.close()
    return losses[4:], again


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"zero": True}], ids=str)
def test_memory_of_a_run_that_was_resumed_from_a_checkpoint(two_ranks, corpus, tmp_path, options):
    changes = {"degrees": {"data": 2, "tensor": 1}, "checkpoint_every": 2, **options}
    for losses, again in two_ranks.run(resumed_twice, corpus, str(tmp_path / "run"), changes):
        assert losses == again


@pytest.mark.long
def test_the_later_of_memory_and_checkpoint(corpus, tmp_path):
    """And no step behind the log's last, which would leave a hole in it."""
    log, folder = tmp_path / "log", tmp_path / "run"
    log.write_text('{"step": 2}\n')
    with memory():
        trainer = trainer_of(corpus, str(folder))
        steps_of(trainer, 2)
        trainer.save(str(folder / "step-000002"))
        steps_of(trainer, 1)
        trainer.unlock()
        assert trainer_of(corpus, str(folder), resume="auto").steps_done == 3
        assert trainer_of(corpus, str(folder), resume="auto", step_log=str(log)).resumed.name == "step-000002"
        assert trainer_of(corpus, str(folder), resume="auto").steps_done == 2  # the third was dropped


def test_mistakes(corpus, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="memory_every 2 needs a checkpoint folder; give --checkpoint DIR"):
        dataclasses.replace(CONFIG, memory_every=2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(UsageError, match="memory_every needs a launcher that restarts the ranks"):
        trainer_of(corpus, str(tmp_path))


def test_a_launcher_that_is_not_ours_has_keepers(tmp_path):
    """They hold what a rank has written until the launcher ends, however it ends."""
    mark = uuid.uuid4().hex
    rank = "import os, sys; from oases.launch.memory import open_pair; first, second = open_pair(); "
    write, read = rank + "os.write(second, b'kept')", rank + "print(os.read(second, 9))"
    launcher = (
        f"import subprocess, sys, time\nfor code in ({write!r}, {read!r}):\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
        "print('both have ended', flush=True)\ntime.sleep(600)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "MARK": mark},
    )  # fmt: skip
    assert run.stdout.readline() == "b'kept'\n"
    assert run.stdout.readline() == "both have ended\n"
    assert len(with_mark(mark)) == 2  # the launcher and one keeper
    run.kill()
    run.communicate()
    wait_until_gone(mark)


# --- runs that are killed ---

STEPS = 20


def losses_of_run(corpus, folder, options):
    values = {name.replace("-", "_"): value for name, value in (kills.SIZES | {"layers": 2} | options).items()}
    return Trainer(TrainConfig(data=str(corpus), steps=STEPS, **values)).train()["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "options"),
    [
        ({"dp": 2, "tp": 1}, {"degrees": {"data": 2, "tensor": 1}}),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_loses_no_step_and_reads_no_checkpoint(two_ranks, corpus, tmp_path, words, options):
    log, folder, moments = tmp_path / "log.jsonl", tmp_path / "run", random.Random(5)

    def kill(run):
        for step in (5, 11):
            assert kills.wait_until(lambda step=step: len(kills.lines_of(log)) >= step, run)
            ranks = run.ranks()[-2:]
            time.sleep(moments.uniform(0, 0.02))
            os.kill(moments.choice(ranks), signal.SIGKILL)

    sizes = {"steps": STEPS, "layers": 2, "checkpoint": folder, "memory_every": 1, "max_restarts": 3}
    arguments = kills.arguments(corpus, step_log=log, **sizes, **words)
    code = kills.Run(arguments, tmp_path / "said").call(kill)
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    assert said.count("SIGKILL; restart") == 2
    assert [path.name for path in folder.iterdir()] == [f"step-{STEPS:06d}"]
    expected = two_ranks.run(losses_of_run, corpus, str(folder), options)[0]
    assert kills.losses_of(log) == list(enumerate(expected, start=1))


@pytest.mark.slow
def test_torchrun_restarts_go_on_from_memory(two_ranks, corpus, tmp_path):
    log, folder, mark = tmp_path / "log.jsonl", tmp_path / "run", uuid.uuid4().hex
    words = kills.command(
        corpus, tp=2, steps=STEPS, layers=2, checkpoint=folder, memory_every=1, step_log=log, resume="auto"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    run = subprocess.Popen(
        [*launcher, *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"MARK": mark},
    )  # fmt: skip
    while not any(line["step"] >= 6 for line in kills.lines_of(log)):
        assert run.poll() is None
        time.sleep(0.01)
    os.kill(next(child for child in kills.children_of(run.pid) if Path(f"/proc/{child}").exists()), signal.SIGKILL)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert "resumed from memory at step" in said
    assert kills.losses_of(log) == list(enumerate(two_ranks.run(losses_of_run, corpus, str(folder), {})[0], start=1))
    wait_until_gone(mark)
