"""Logs at Weights & Biases, by a module of the test's own in its place."""

import sys

import pytest

from oases import TrainConfig, Trainer
from oases.cli import main
from oases_train.logs import scalars_of

VALUES = {
    "hidden": 16, "layers": 1, "heads": 4, "sequence": 8, "batch": 16, "warmup": 1, "validation_batches": 1,
    "peak_flops": 1e9, "wandb": "oases",
}  # fmt: skip
MODULE = """
runs = []

class Run:
    def __init__(self, given):
        self.given, self.logged, self.code = given, [], None

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.code = exit_code

def init(**given):
    runs.append(Run(given))
    return runs[-1]
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb.runs
    del sys.modules["wandb"]


def test_the_values_of_every_step(runs, corpus):
    reports = []
    Trainer(TrainConfig(data=corpus, steps=2, **VALUES)).train(reports.append)
    (run,) = runs
    assert run.given["project"] == "oases"
    assert run.given["config"]["hidden"] == 16
    assert [step for step, _ in run.logged] == [1, 2]
    for (_, values), report in zip(run.logged, reports, strict=True):
        expected = report.values() | {"stall_seconds": values["checkpoint/stall_seconds"]}
        assert values == scalars_of({name: value for name, value in expected.items() if name != "step"})
        assert values["train/loss"] == report.loss
    assert run.code == 0


@pytest.mark.long
def test_a_resumed_run_continues_the_run(runs, corpus, tmp_path):
    given = VALUES | {"data": corpus, "steps": 4, "checkpoint": str(tmp_path / "saved")}

    def fails(report):
        if report.step == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Trainer(TrainConfig(**given)).train(fails)
    Trainer(TrainConfig(checkpoint_every=2, **given)).train()  # not resumed: another run
    assert runs[0].code == 1
    Trainer(TrainConfig(**given | {"resume": "auto", "steps": 6})).train()
    other = given | {"checkpoint": str(tmp_path / "other"), "resume": str(tmp_path / "saved"), "steps": 8}
    Trainer(TrainConfig(**other)).train()
    ids = [run.given["id"] for run in runs]
    assert ids[0] != ids[1] == ids[2] == ids[3]
    assert all(run.given["resume"] == "allow" for run in runs)
    assert [[step for step, _ in run.logged] for run in runs[1:]] == [[1, 2, 3, 4], [5, 6], [7, 8]]


def test_overlap_by_collective():
    values = {"loss": 2.5, "bubble": None, "overlap": {"stack 0/F all_reduce": {"exposed": 0.25}}, "skipped": False}
    expected = {"overlap/stack 0/F all_reduce/exposed": 0.25, "train/loss": 2.5, "train/skipped": 0.0}
    assert scalars_of(values) == expected


def test_without_the_package(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for value, said in (("oases", "not installed; pip install wandb, or use --tensorboard DIR"), ("", "no project")):
        with pytest.raises(SystemExit) as caught:
            main(["train", "--wandb", value])
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
