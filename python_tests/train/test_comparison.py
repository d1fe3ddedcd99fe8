"""The predicted step laid over the measured one: by hand, and by the command line."""

import dataclasses
import json

import kills
import pytest

from oases.cli import main
from oases.plans.gpt import gpt
from oases.plans.plan import Plan, Prediction, Segment, Stage
from oases.terminal import console
from oases_train.meter import StepParts
from oases_train.metrics import compare, comparison_table

MODEL = gpt(hidden=16, layers=2, heads=4, sequence=8, vocabulary=256)
PLAN = Plan(MODEL, 2, 2, 16, 2, (Stage((Segment(2, 1, "oases"),)), Stage((Segment(2, 1, "oases"),))))
PREDICTION = Prediction(2.0, 0.3, 0.5, (1000, 1000), 0.2)
RANKS = [StepParts(1.5, 0.5, 0.2, 0.1, 1e6), StepParts(1.6, 0.1, 0.4, 0.05, 2e6)]
NAMES = ["step", "compute", "exposed communication", "bubble", "optimizer"]


def column(comparison, key):
    return [comparison[name][key] for name in NAMES]


def test_parts_and_their_ratios():
    found = compare(dataclasses.replace(PLAN, prediction=PREDICTION), RANKS)
    assert list(found) == NAMES
    assert column(found, "predicted_seconds") == pytest.approx([2.0, 1.0, 0.3, 0.5, 0.2])
    assert column(found, "measured_seconds") == pytest.approx([1.6, 0.6, 0.5, 0.4, 0.1])
    assert column(found, "ratio") == pytest.approx([1.25, 1 / 0.6, 0.6, 1.25, 2.0])


def test_what_is_not_known_is_none():
    assert compare(PLAN, RANKS) is None
    older = dataclasses.replace(PREDICTION, optimizer_seconds=None)
    found = compare(dataclasses.replace(PLAN, prediction=older), RANKS)
    assert column(found, "predicted_seconds") == [2.0, None, 0.3, 0.5, None]
    assert column(found, "ratio") == pytest.approx([1.25, None, 0.6, 1.25, None])
    still = [dataclasses.replace(RANKS[0], exposed=0.0)]
    found = compare(dataclasses.replace(PLAN, prediction=PREDICTION), still)
    assert found["exposed communication"]["ratio"] is None


def test_the_table():
    older = dataclasses.replace(PREDICTION, optimizer_seconds=None)
    found = compare(dataclasses.replace(PLAN, prediction=older), RANKS)
    with console.capture() as said:
        console.print(comparison_table(found))
    lines = {line.split("│")[1].strip(): line for line in said.get().splitlines() if "│" in line}
    assert "2000.0 ms" in lines["step"]
    assert "1600.0 ms" in lines["step"]
    assert "1.25" in lines["step"]
    assert "500.0 ms" in lines["bubble"]
    assert lines["optimizer"].count(" - ") == 2


def test_the_command_lays_both_beside_each_other(ranks_at_hand, tmp_path, capfd):
    data = kills.write_corpus(tmp_path / "text.txt")
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    options = ["--plan", str(plan), "--data", str(data), "--json", str(out), "--steps", "3", "--warmup", "1"]
    options += ["--validation-batches", "1"]
    plan.write_text(dataclasses.replace(PLAN, prediction=PREDICTION).to_json())
    main(["train", *options])
    result, said = json.loads(out.read_text()), capfd.readouterr().out
    assert "the predicted step over the measured one" in said
    assert "training 2/3 loss" in said
    assert "of the peak: matmuls of 512 x 512 in float32, measured on 2 ranks at once" in said
    parts = result["prediction"]
    assert parts["step"]["predicted_seconds"] == 2.0
    assert parts["step"]["measured_seconds"] == result["step_seconds"] > 0
    for row in parts.values():
        assert row["ratio"] is None or row["ratio"] == row["predicted_seconds"] / row["measured_seconds"]
    measured = [parts[name]["measured_seconds"] for name in NAMES]
    assert sum(measured[1:]) == pytest.approx(measured[0])
