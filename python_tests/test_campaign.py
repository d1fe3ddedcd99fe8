"""Fault campaign: its plan and judgement, and ten minutes of it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import tensor

from reliability.campaign.__main__ import begin, main
from reliability.campaign.faults import MOMENTS, Fault
from reliability.campaign.report import COLUMNS, WORLD_COLUMNS, rows_by_kind, rows_by_world, write_report
from reliability.campaign.sessions import KINDS, WORLDS, Expected, Plan, Session, differs, judge, largest, plan_faults

EACH = 5
"""Faults of a session."""
CUT = (
    "dp 2", "2 nodes", "pp 2", "resharding", "small disk", "clock", "torchrun, shards", "2 nodes x tp 2",
    "torchrun, files", "torchrun, oases",
)  # fmt: skip
"""Runs of the ten minutes, a session each: they meet every kind of fault."""


def planned(sessions, seed=0, worlds=tuple(WORLDS)):
    return [plan_faults(number, Plan(seed, EACH, worlds)) for number in range(sessions)]


def test_every_kind_of_fault_comes_in_every_kind_of_run():
    met = {(world, fault.kind) for world, faults in planned(12 * len(WORLDS)) for fault in faults}
    assert met == {(name, kind) for name, world in WORLDS.items() for kind in world.kinds}
    assert {fault.kind for _, faults in planned(len(CUT), worlds=CUT) for fault in faults} == set(KINDS)


def test_results_of_other_sources_are_removed_and_other_files_are_not(tmp_path):
    begin(tmp_path)
    (tmp_path / "sessions-0.jsonl").touch()
    begin(tmp_path)
    assert (tmp_path / "sessions-0.jsonl").is_file()
    (tmp_path / "sources").write_text("another")
    begin(tmp_path)
    assert not (tmp_path / "sessions-0.jsonl").exists()
    (tmp_path / "sources").unlink()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit, match="holds other files"):
        begin(tmp_path)
    assert (tmp_path / "thesis.tex").is_file()


def test_nan_is_a_difference():
    assert largest([1.0, 3.0, 2.0]) == 3.0
    assert largest([1.0, float("nan"), 2.0]) != largest([1.0, float("nan"), 2.0])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_plan_is_the_same_again_and_in_order(seed):
    assert planned(30, seed) == planned(30, seed) != planned(30, seed + 1)
    for _, faults in planned(30, seed):
        steps = [fault.at_step for fault in faults]
        assert steps == sorted(set(steps))
        assert {fault.moment for fault in faults} <= set(MOMENTS)


class Ended:
    """Run that has ended with these losses and weights."""

    def __init__(self, place, losses, weight=1.0, exact_steps=3, left=()):
        self.losses, self.exact_steps, self.behind = losses, exact_steps, list(left)
        self.file = place / "ended.safetensors"
        save_file({"weight": tensor([4.0, weight])}, self.file)

    def result(self):
        return list(enumerate(self.losses, start=1)), self.file.read_bytes().hex()

    def weights(self):
        return self.file

    def left(self):
        return self.behind


@pytest.fixture
def expected(tmp_path):
    losses, digest = Ended(tmp_path, (3.0, 2.0, 1.0)).result()
    return Expected(losses, digest, (tmp_path / "ended.safetensors").rename(tmp_path / "weights"))


@pytest.mark.parametrize(
    ("losses", "options", "said"),
    [
        ((3.0, 2.0, 1.0), {}, ""),
        ((3.0, 2.0, 1.0 + 1e-12), {}, "a loss of the first 60 steps differs"),
        ((3.0, 2.0, 1.0), {"weight": 1.0001}, "the weights differ"),
        ((3.0, 2.0, 1.0 + 1e-9), {"exact_steps": 2, "weight": 1.0001}, ""),
        ((3.0, 2.0 + 1e-9, 1.0), {"exact_steps": 2}, "a loss of the first 2 steps differs"),
        ((3.0, 2.0, 1.01), {"exact_steps": 2}, "the losses after other degrees are 1.0e-02 apart"),
        ((3.0, 2.0, 1.0), {"exact_steps": 2, "weight": 1.1}, "the weights after other degrees are 2.5e-02 apart"),
        ((3.0, 2.0), {"exact_steps": 2}, "the log has 2 steps, that of the undisturbed run 3"),
    ],
)
def test_differences_are_found(tmp_path, expected, losses, options, said):
    found = differs(Ended(tmp_path, losses, **({"exact_steps": 60} | options)), expected)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_what_was_wrong_is_told_and_reported(tmp_path, expected):
    late = Fault("kill", "save", 4, True, checkpoint=4, next_step=5, seconds=31.2)
    lost = Fault("stop", "step", 8, checkpoint=6, next_step=6, seconds=1.0)
    missed = Fault("kill", "step", 9)
    session = Session(0, "tp 2", [late, lost, missed])
    run = Ended(tmp_path, (3.0, 2.0, 1.0), exact_steps=60, left=["a process"])
    session.wrong = judge(run, session, expected, 30.0)
    assert session.wrong == [
        ("hang", "31 s from kill to the next step"),
        ("lost step", "stop: step 6 was repeated although checkpoint 6 was complete"),
        ("left", "left behind: a process"),
    ]
    kinds = [dict(zip(COLUMNS, row, strict=True)) for row in rows_by_kind([session])]
    assert [(row["fault"], row["number"], row["worst s"]) for row in kinds] == [
        ("kill", "1", "31.2"),
        ("stop", "1", "1.0"),
        ("all", "2", "31.2"),
    ]
    assert kinds[-1]["while saving"] == "1 (50 %)"
    assert dict(zip(WORLD_COLUMNS, rows_by_world([session])[0], strict=True))["left behind"] == "1"
    write_report(tmp_path / "report.md", [session], "python campaign")
    assert "- session 0 (tp 2): left behind: a process\n" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_minutes_of_faults(tmp_path):
    report = tmp_path / "report.md"
    options = {
        "--faults": EACH * (len(CUT) - 1) + 1,  # a session counts fewer where it ends before a fault
        "--each": EACH, "--folder": tmp_path, "--report": report,
        "--most-seconds": 150,  # on a busy machine
    }  # fmt: skip
    code = main([*(str(word) for pair in options.items() for word in pair), "--worlds", *CUT])
    assert code == 0, report.read_text()
    rows = [json.loads(line) for line in Path(tmp_path / "sessions-0.jsonl").read_text().splitlines()]
    hit = [fault for row in rows for fault in row["faults"] if fault["seconds"] is not None]
    assert 3 * sum(fault["hit_while_saving"] for fault in hit) >= len(hit), report.read_text()
