"""reliability/speed.py: what it reads of a benchmark's result, and the end of a benchmark that fails."""

import pytest

from reliability import speed

RESULT = {
    "config": {"step_seconds": 1.0}, "name": "x", "rounds": 3, "rows": [{"step_seconds": 0.5, "share": 0.9}],
    "seconds": {"sync": {"median": 2.0}},
}  # fmt: skip


def test_seconds_are_found_by_their_place():
    assert dict(speed.seconds_in(RESULT)) == {("rows", "0", "step_seconds"): 0.5, ("seconds", "sync", "median"): 2.0}


def test_trees_are_compared_by_medians(monkeypatch, tmp_path):
    took = {tmp_path: iter([2.0, 4.0, 3.0]), speed.HERE: iter([3.0, 6.0, 1.5])}
    monkeypatch.setattr(speed, "measure", lambda tree, bench: {("a",): next(took[tree]), (tree.name,): 1.0})
    common, *alone = speed.compare(tmp_path, ["host"], 3)
    assert common == {"bench": "host", "place": "a", "before": 3.0, "now": 3.0, "ratio": 1.0}
    assert [row["ratio"] for row in alone] == [None, None]


def test_a_benchmark_that_fails_is_shown():
    with pytest.raises(SystemExit, match=r"oases bench nothing ended with 2:\n.*invalid choice: 'nothing'"):
        speed.measure(speed.HERE, "nothing")
