"""Checkpoints: whole or named as broken, the newest kept, written behind the training, read by any degree or plan."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from unittest import mock

import kills
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as saver
from plan_runs import PLANS
from safetensors.torch import load_file

from oases import TrainConfig, Trainer
from oases.checkpoint import integrity, storage, writer
from oases.checkpoint.files import export
from oases.checkpoint.lock import LOCK
from oases.checkpoint.metadata import FORMAT, Metadata
from oases.cli import main
from oases.core.execution.failure import FailedRankError
from oases.errors import UsageError
from oases.plans.plan import Plan
from oases_train.config import config_for
from oases_train.plan import Run

CONFIG = TrainConfig(
    hidden=16, layers=2, heads=4, sequence=8, batch=16, steps=6, warmup=1, validation_batches=1, learning_rate=1e-2,
)  # fmt: skip


def trained(corpus, **changes):
    """(losses, the result) of a run."""
    result = Trainer(dataclasses.replace(CONFIG, data=corpus, **changes)).train()
    return result["losses"], result


@pytest.fixture(scope="module")
def alone(corpus):
    return trained(corpus)[0]


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4 of a run of 4 steps of 6."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus, checkpoint=str(folder), checkpoint_every=2))
    with pytest.raises(InterruptedError):
        trainer.train(stop_after(5))
    return folder


def stop_after(steps):
    def stop(report):
        if report.step == steps:
            raise InterruptedError

    return stop


def names(folder):
    """Names in a folder but that of its lock, which another rank may be about to remove."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name != LOCK)


# --- going on ---


def test_a_run_goes_on_equal_to_the_bit(corpus, alone, saved):
    for path in (saved / "step-000002", saved):
        start = 2 if path != saved else 4
        losses, result = trained(corpus, resume=str(path))
        assert losses == alone[start:]
        assert result["resumed"] == str(saved / f"step-00000{start}")


def test_a_restarted_run_finds_its_own_checkpoint(corpus, alone, saved, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    assert trained(corpus, checkpoint=str(folder), resume="auto")[0] == alone  # nothing there yet
    assert names(folder) == ["step-000006"]
    shutil.rmtree(folder)
    shutil.copytree(saved, folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    losses, result = trained(corpus, checkpoint=str(folder), resume=str(saved / "step-000002"))
    assert losses == alone[4:]
    assert result["checkpoints"]["saved"] == 1
    assert trained(corpus, checkpoint=str(folder))[0] == []  # it was done


def test_other_batches_are_told(corpus, saved):
    with pytest.warns(UserWarning, match="resumes with different batches: seed 0 there and 7 here"):
        Trainer(dataclasses.replace(CONFIG, data=corpus, resume=str(saved), seed=7))


def test_random_numbers_go_on(corpus, tmp_path):
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus))
    trainer.step()
    trainer.save(str(tmp_path / "c"))
    expected = torch.rand(3)
    torch.manual_seed(99)
    resumed = Trainer(dataclasses.replace(CONFIG, data=corpus, resume=str(tmp_path / "c")))
    assert torch.equal(torch.rand(3), expected)
    for one in (trainer, resumed):
        one.validate()  # which draws, too
        one.backward(1)
    assert resumed.model.stack.calls == trainer.model.stack.calls


def two_steps_more(corpus, folder, plan):
    """Losses of the next two steps as the folder's newest checkpoint goes on, under a plan if one is given."""
    made = None if plan is None else Plan.from_json(plan)
    given = {"data": corpus, "warmup": 1, "validation_batches": 1, "learning_rate": 1e-2, "checkpoint": folder}
    record = [Metadata.read(path) for path in sorted(Path(folder).glob("step-*"))][-1:]
    done = record[0].step if record else 0
    values = given | {"steps": 6, "checkpoint_every": 2, "resume": "auto"}
    config = dataclasses.replace(CONFIG, **values) if made is None else config_for(made, values)
    trainer = Trainer(config, plan=made)
    losses = []
    if dist.is_initialized():
        dist.barrier()
    # An error of all ranks at once: the first of them is raised on the others.
    with pytest.raises((InterruptedError, FailedRankError)) if done < 4 else mock.MagicMock():
        trainer.train(lambda report: (losses.append(report.loss), stop_after(done + 3)(report)))
    trainer.close()
    return losses[:2]


@pytest.mark.long
def test_one_process_then_two_then_two_by_two(two_ranks, four_ranks, corpus, alone, tmp_path):
    folder = str(tmp_path / "checkpoints")
    losses = two_steps_more(corpus, folder, None)
    losses += two_ranks.run(two_steps_more, corpus, folder, None)[1]
    losses += four_ranks.run(two_steps_more, corpus, folder, PLANS[4]["tp 2 x dp 2"].to_json())[3]
    assert losses == pytest.approx(alone, rel=1e-4)


# --- broken ones ---


FILES = ["checkpoint.json", "checksums.json", "shard-00001-model-00001-of-00001.safetensors"]


def harm(file, how):
    if how == "missing":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    if how == "truncated":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.few(3, 100)
@pytest.mark.parametrize("how", ["missing", "truncated", "changed"])
@pytest.mark.parametrize("name", FILES)
def test_a_broken_newest_is_skipped_and_named(corpus, alone, saved, tmp_path, name, how):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    harm(folder / "step-000004" / name, how)
    with pytest.warns(UserWarning, match=rf"step-000004' is corrupt and skipped: {name}"):
        losses, _ = trained(corpus, resume=str(folder))
    assert losses == alone[2:]
    if name != "checkpoint.json" or how != "missing":  # then it is none
        with pytest.raises(UsageError, match=r"is corrupt"):
            trained(corpus, resume=str(folder / "step-000004"))
    with pytest.warns(UserWarning, match=r"is renamed to 'step-000004.broken'"):
        losses, _ = trained(corpus, resume="auto", checkpoint=str(folder))
    assert losses == alone[2:]
    assert names(folder) == ["step-000002", "step-000004.broken", "step-000006"]


def test_the_files_are_those_that_were_harmed(saved):
    assert names(saved / "step-000004") == sorted(FILES)


def newest_of(folder):
    config = dataclasses.replace(CONFIG, checkpoint=folder, resume="auto")
    trainer = Trainer(config)
    return trainer.steps_done, str(trainer.resumed)


def test_all_ranks_skip_what_one_finds_broken(two_ranks, saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    harm(folder / "step-000004" / sorted(FILES)[1], "changed")  # of rank 1's share
    assert two_ranks.run(newest_of, str(folder)) == [(2, str(folder / "step-000002"))] * 2


def test_where_all_are_broken_nothing_is_pretended(corpus, saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    for path in folder.iterdir():
        harm(path / FILES[2], "truncated")
    with (
        pytest.warns(UserWarning, match="corrupt and skipped"),
        pytest.raises(UsageError, match="holds no valid checkpoint"),
    ):
        trained(corpus, resume=str(folder))


def test_a_newer_format_is_refused(corpus, saved, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    newest = folder / "step-000004"
    record = json.loads((newest / "checkpoint.json").read_text())
    (newest / "checkpoint.json").write_text(json.dumps(record | {"format": FORMAT + 1, "more": 1}))
    files = [path for path in newest.iterdir() if path.name != integrity.CHECKSUMS]
    integrity.write_checksums(newest, integrity.checksums(files))
    for path in (newest, folder):
        with pytest.raises(UsageError, match=rf"is of format {FORMAT + 1}, this oases reads formats up to {FORMAT}"):
            trained(corpus, resume=str(path))
        with pytest.raises(SystemExit):
            main(["train", "--resume", str(path)])
        assert f"is of format {FORMAT + 1}" in capsys.readouterr().err


# --- the folder ---


def test_the_newest_are_kept(corpus, tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / ".step-000009.part").mkdir(parents=True)  # of a run that was killed
    _, result = trained(corpus, checkpoint=str(folder), checkpoint_every=1, keep=2)
    assert names(folder) == ["step-000005", "step-000006"]
    assert result["checkpoints"] == result["checkpoints"] | {"saved": 6, "failed": []}
    assert result["checkpoints"]["stall_seconds"] > 0
    assert result["checkpoints"]["write_seconds"] > 0


@pytest.mark.long
def test_a_folder_with_later_steps_is_refused(corpus, saved, tmp_path):
    with pytest.raises(UsageError, match=r"holds step-000004, which is later than the step 0 .* --resume auto"):
        Trainer(dataclasses.replace(CONFIG, data=corpus, checkpoint=str(saved)))
    with pytest.raises(UsageError, match="later than the step 2"):
        Trainer(dataclasses.replace(CONFIG, data=corpus, checkpoint=str(saved), resume=str(saved / "step-000002")))
    with pytest.raises(UsageError, match="is a checkpoint itself"):
        Run.of(dataclasses.replace(CONFIG, data=corpus, checkpoint=str(saved / "step-000002")), 1).corpus()


# --- writing ---


def test_training_goes_on_while_a_checkpoint_is_written(corpus, alone, tmp_path):
    """The thread is held up until two more steps are done; what it then writes is the state from before them."""
    gate, save = threading.Event(), saver.save
    folder = tmp_path / "checkpoints"

    def held_up(*arguments, **options):
        assert gate.wait(60)
        return save(*arguments, **options)

    def on_step(report):
        if report.step == 4:
            gate.set()
            raise InterruptedError

    config = dataclasses.replace(CONFIG, data=corpus, checkpoint=str(folder), checkpoint_every=2)
    trainer = Trainer(config)
    with mock.patch.object(saver, "save", held_up), pytest.raises(InterruptedError):
        trainer.train(on_step)
    assert names(folder) == ["step-000002"]  # a run that fails waits for it
    assert trained(corpus, resume=str(folder))[0] == alone[2:]


def fails_on_rank(victim, corpus, folder):
    """Return the failures of a run whose second checkpoint finds one rank's disk full, and its folder's files."""
    found, calls = integrity.checksums, []

    def checksums(files):
        calls.append(1)
        if len(calls) == 2 and (not dist.is_initialized() or dist.get_rank() == victim):
            raise OSError(errno.ENOSPC, "No space left on device")
        return found(files)

    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus, checkpoint=folder, checkpoint_every=2))
    with mock.patch.object(storage, "checksums", checksums):
        return trainer.train()["checkpoints"]["failed"], names(folder)


@pytest.mark.long
def test_a_full_disk_on_one_rank_loses_nothing(two_ranks, corpus, tmp_path):
    for failed, left in two_ranks.run(fails_on_rank, 1, corpus, str(tmp_path / "c")):
        assert "step-000004' could not be written: rank 1: [Errno 28] No space left on device" in failed[0]
        assert left == ["step-000002", "step-000006"]


def test_a_warning_tells_of_a_checkpoint_that_failed(corpus, tmp_path):
    with pytest.warns(
        UserWarning, match="No space left on device; free disk space, or save elsewhere; training continues"
    ):
        fails_on_rank(0, corpus, str(tmp_path / "c"))


@pytest.mark.slow
def test_a_disk_that_is_really_full(corpus, tmp_path):
    """A file system of the size of three checkpoints, of which nine are to be kept."""
    tried = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("user namespaces are off")
    disk = tmp_path / "disk"
    disk.mkdir()
    run = kills.command(corpus, tp=1, steps=9, checkpoint=disk / "c", checkpoint_every=1, keep=9)
    script = 'mount -t tmpfs -o size=3m none "$0"; "$@"; code=$?; ls -A "$0/c"; exit $code'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, str(disk), *run], capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr  # the last step could not be saved
    assert "step-000009' could not be written: rank 0: " in done.stderr
    assert "training continues" in done.stderr
    left = [line for line in done.stdout.splitlines() if "step-" in line]
    assert left == [f"step-00000{step}" for step in range(1, len(left) + 1)]
    assert 1 <= len(left) <= 4


@pytest.mark.parametrize(
    ("error", "seconds"), [(dist.DistBackendError("rank 1 is gone"), "0.1"), (ValueError("a bug"), "0.2")]
)
def test_a_run_that_lost_a_rank_does_not_wait_for_its_checkpoint(monkeypatch, tmp_path, error, seconds):
    ended = threading.Event()
    monkeypatch.setattr(writer, "LOST_SECONDS", 0.1)
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(saver, "save", lambda *given, **options: ended.wait())

    def fails():
        with writer.CheckpointWriter(tmp_path, 2, None) as saving:
            saving.start({}, mock.Mock(step=1))
            raise error

    why = f"is incomplete: it took more than {seconds} s"
    with pytest.warns(UserWarning, match=why), pytest.raises(type(error)):
        fails()
    ended.set()


def test_the_next_checkpoint_removes_what_a_failed_one_could_not(corpus, tmp_path):
    folder = tmp_path / "checkpoints"

    def leave(report):
        (folder / ".step-000001.part").mkdir(exist_ok=True)  # as on a disk that was read-only for a while

    config = dataclasses.replace(CONFIG, data=corpus, checkpoint=str(folder), steps=2)
    Trainer(config).train(leave)
    assert [path.name for path in folder.iterdir()] == ["step-000002"]


# --- export ---


def saves(corpus, folder):
    Trainer(dataclasses.replace(CONFIG, data=corpus, steps=1, checkpoint=folder)).train()


@pytest.mark.long
def test_exported_weights_are_whole(two_ranks, corpus, tmp_path, capsys):
    folder, file = str(tmp_path / "checkpoints"), tmp_path / "model.safetensors"
    two_ranks.run(saves, corpus, folder)
    main(["export", folder, str(file)])
    assert "tensors in" in capsys.readouterr().out
    whole = Trainer(dataclasses.replace(CONFIG, data=corpus, resume=folder)).model.state_dict()
    found = load_file(file)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    with pytest.raises(UsageError, match="cannot be written"):
        export(folder, tmp_path / "nowhere" / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe' is not a file; give the path of a file to write"):
        export(folder, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    second = "shard-00002-model-00001-of-00001.safetensors"
    harm(Path(folder) / "step-000001" / second, "changed")
    with pytest.raises(UsageError, match=rf"{second} is not as it was written"):
        export(folder, file)


def test_one_process_for_all_ranks_saves_nothing(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["train", "--backend", "sim:alpha=1us,bandwidth=1gbit,single_process", "--checkpoint", f"{tmp_path}/c"])
    assert "checkpoints need all ranks" in capsys.readouterr().err
