"""TensorBoard's curves, read back: every step once, also where a run was started again."""

import importlib.util
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from oases import TrainConfig, Trainer
from oases.cli import main
from oases_train.logs import Scalars, scalars_of

VALUES = {
    "hidden": 16, "layers": 2, "heads": 4, "sequence": 8, "batch": 16, "warmup": 1, "validation_batches": 1,
}  # fmt: skip


def curves(folder):
    """(step, value) by tag, as TensorBoard shows them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_events_read_back(corpus, tmp_path):
    reports = []
    config = TrainConfig(data=corpus, steps=3, tensorboard=str(tmp_path / "curves"), **VALUES)
    Trainer(config).train(reports.append)
    found = curves(tmp_path / "curves")
    expected = {
        "train/loss": "loss",
        "train/learning_rate": "learning_rate",
        "train/gradient_norm": "gradient_norm",
        "train/skipped": "skipped",
        "speed/step_seconds": "seconds",
        "speed/tokens_per_second": "tokens_per_second",
        "speed/model_flops_per_second": "flops_per_second",
        "speed/utilisation": "utilisation",
        "memory/peak_bytes": "memory_bytes",
        "overlap/exposed_share": "exposed",
        "overlap/bubble_share": "bubble",
    }
    assert found.keys() == expected.keys() | {"checkpoint/stall_seconds"}
    for tag, name in expected.items():
        values = [(each.step, float(getattr(each, name))) for each in reports]
        assert found[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in values]


@pytest.mark.long
def test_a_run_that_goes_on_has_each_step_once(corpus, tmp_path):
    folder, saved = tmp_path / "curves", tmp_path / "checkpoints"
    given = VALUES | {"data": corpus, "steps": 6, "tensorboard": str(folder), "checkpoint": str(saved)}

    def killed(report):
        if report.step == 6:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Trainer(TrainConfig(checkpoint_every=3, **given)).train(killed)
    assert [step for step, _ in curves(folder)["train/loss"]] == [1, 2, 3, 4, 5]
    result = Trainer(TrainConfig(resume="auto", **given)).train()
    assert result["resumed"] == str(saved / "step-000003")
    whole = Trainer(TrainConfig(**VALUES, data=corpus, steps=6)).train()
    assert result["losses"] == whole["losses"][3:]
    expected = [(step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(whole["losses"], start=1)]
    assert curves(folder)["train/loss"] == expected


def test_what_was_written_before_a_checkpoint_is_not_lost(tmp_path):
    scalars = Scalars(tmp_path, 0)  # left open, as by a process that is killed
    scalars.write(step=1, loss=2.5, bubble=None)
    scalars.sync()
    assert curves(tmp_path) == {"train/loss": [(1, 2.5)]}
    scalars.__exit__(None, None, None)


def test_overlap_by_collective():
    values = {"loss": 2.5, "bubble": None, "overlap": {"stack 0/F all_reduce": {"exposed": 0.25}}, "skipped": False}
    expected = {"overlap/stack 0/F all_reduce/exposed": 0.25, "train/loss": 2.5, "train/skipped": 0.0}
    assert scalars_of(values) == expected


def fails(capsys, *options):
    with pytest.raises(SystemExit) as caught:
        main(["train", *options])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_mistakes_are_told_before_ranks_start(capsys, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "a file is in the way; give the path of a folder" in fails(capsys, "--tensorboard", str(file))
    assert "a file is in the way" in fails(capsys, "--tensorboard", "/dev/null/curves")
    with Scalars(tmp_path / "used", 0) as scalars:
        scalars.write(step=1, loss=1.0)
    assert "holds the curves of another run" in fails(capsys, "--tensorboard", str(tmp_path / "used"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    said = fails(capsys, "--tensorboard", str(tmp_path / "new"))
    assert "needs the package tensorboard, which is not installed; pip install tensorboard" in said
