"""Locks of checkpoint folders: one run at a time, whatever ended the last one."""

import errno
import gc
import json
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from oases import TrainConfig, Trainer
from oases.checkpoint import lock
from oases.checkpoint.lock import LOCK, FolderLock
from oases.checkpoint.writer import SaveError
from oases.cli import main
from oases.errors import UsageError

HOLDER = """
import sys
from oases.checkpoint import lock
held = lock.FolderLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
held.release()
"""


@pytest.fixture
def other(tmp_path):
    """Start another process that holds the folder."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.2)


@pytest.mark.slow
def test_another_run_is_named_until_it_ends(tmp_path, other):
    for end in ("in order", "killed"):
        process = other()
        with pytest.raises(UsageError, match=rf"belongs to another run, process {process.pid} on .*, started 20"):
            FolderLock(tmp_path)
        if end == "killed":
            process.kill()
        process.communicate()
        assert (tmp_path / LOCK).exists() == (end == "killed")
        FolderLock(tmp_path).release()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.long
def test_runs_of_one_process_hold_together(tmp_path, other):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.release()
    first.release()  # once
    second.require()
    assert (tmp_path / LOCK).exists()
    del second
    gc.collect()
    assert not (tmp_path / LOCK).exists()
    other()


@pytest.mark.long
def test_a_dying_run_is_waited_for(tmp_path, other, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 60)
    process = other()
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"]).wait()
    FolderLock(tmp_path).release()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def lockf(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", lockf)
    with pytest.raises(UsageError, match="cannot be written: No locks available; give another folder"):
        FolderLock(tmp_path)


def test_a_folder_that_was_lost_is_written_no_more(tmp_path):
    held = FolderLock(tmp_path)
    (tmp_path / LOCK).unlink()
    with pytest.raises(OSError, match=r"no longer this run's: which '.*\.lock' does not name"):
        held.require()
    (tmp_path / LOCK).write_text(json.dumps({"host": "h", "process": 7, "since": 0}))
    with pytest.raises(OSError, match="no longer this run's: process 7 on h"):
        held.require()
    held.release()
    assert (tmp_path / LOCK).exists()  # the other's


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("content", ["", "{", "[]", '{"process": 1}', '{"host": 1, "process": "x", "since": "y"}'])
def test_a_lock_file_may_hold_anything(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    FolderLock(tmp_path).release()


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="symbolic links"):
        FolderLock(tmp_path)
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.slow
def test_a_lock_lost_by_reading_the_file_is_taken_again_or_known_as_lost(tmp_path, other):
    held = FolderLock(tmp_path)
    (tmp_path / LOCK).read_text()  # ends the lock
    held.require()
    with pytest.raises(AssertionError):
        other()
    (tmp_path / LOCK).read_text()
    other()
    with pytest.raises(OSError, match="no longer this run's"):
        held.require()
    held.release()
    assert (tmp_path / LOCK).exists()


# --- runs ---


def config(data, folder, **changes):
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "sequence": 8, "batch": 4, "steps": 4, "warmup": 1}
    return TrainConfig(**{**sizes, "data": data, "validation_batches": 1, "checkpoint": folder, **changes})


def refused(data, folder):
    lock._PATIENCE_SECONDS = 0.2
    with pytest.raises(UsageError, match="belongs to another run, process") as caught:
        Trainer(config(data, folder, resume="auto"))
    return str(caught.value)


@pytest.mark.long
def test_a_second_run_is_refused_on_all_ranks_and_touches_nothing(two_ranks, corpus, tmp_path):
    folder = tmp_path / "run"
    mine = Trainer(config(corpus, str(folder)))
    part = folder / ".step-000002.part"  # being written
    part.mkdir()
    said = two_ranks.run(refused, corpus, str(folder))
    assert f"process {os.getpid()} on " in said[0] == said[1]
    assert part.is_dir()
    mine.train()
    assert os.listdir(folder) == ["step-000004"]
    two_ranks.run(finished, corpus, str(folder))


def finished(data, folder):
    trainer = Trainer(config(data, folder, resume="auto"))
    assert trainer.steps_done == 4
    assert os.path.exists(f"{folder}/{LOCK}")
    dist.barrier()
    trainer.close()
    dist.barrier()
    assert not os.path.exists(f"{folder}/{LOCK}")


def test_a_run_that_lost_its_folder_says_so_and_writes_nothing(corpus, tmp_path):
    folder = tmp_path / "run"
    trainer = Trainer(config(corpus, str(folder), checkpoint_every=2))

    def on_step(report):
        if report.step == 2:
            (folder / LOCK).unlink(missing_ok=True)

    with (
        pytest.warns(UserWarning, match=r"step-000002' could not be written: .* no longer this run's"),
        pytest.raises(SaveError, match="step-000004"),
    ):
        trainer.train(on_step)
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_the_command_says_so_before_ranks_start(corpus, tmp_path, other, capsys, monkeypatch):
    process = other()
    monkeypatch.setattr("oases.launch.ranks.run_ranks", lambda *given: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as caught:
        main(["train", "--data", corpus, "--checkpoint", str(tmp_path), "--tp", "1"])
    assert caught.value.code == 2
    assert f"belongs to another run, process {process.pid}" in capsys.readouterr().err
    process.send_signal(signal.SIGKILL)
