"""Load traces: written, read back, made up."""

import numpy as np
import pytest

from oases.errors import UsageError
from oases_bench.loads import generate
from oases_train.traces import Recorder, replay


def test_what_is_recorded_is_replayed(tmp_path):
    steps = list(generate(experts=4, devices=2, tokens=50, steps=3, seed=3))
    with Recorder(tmp_path / "loads.jsonl") as recorder:
        for step, counts in enumerate(steps[:2]):
            recorder.write(step, 0, counts)
    with Recorder(tmp_path / "loads.jsonl", append=True) as recorder:
        recorder.write(2, 0, steps[2])
    found = list(replay(tmp_path / "loads.jsonl"))
    assert [(step, layer) for step, layer, _ in found] == [(0, 0), (1, 0), (2, 0)]
    for (_, _, counts), expected in zip(found, steps, strict=True):
        assert np.array_equal(counts, expected)


def test_a_trace_that_was_cut_off_ends_early(tmp_path):
    path = tmp_path / "loads.jsonl"
    with Recorder(path) as recorder:
        recorder.write(0, 0, [[1], [2]])
        recorder.write(1, 0, [[3], [4]])
    path.write_text(path.read_text()[:-5])
    assert [step for step, _, _ in replay(path)] == [0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a trace of loads"),
        ("[1]\n", "is not a trace of loads"),
        ("{", "line 1 is not JSON: Expecting property name"),
        ('{"kind": "oases loads", "version": 2}\n', "line 1: version 2 is unknown; this oases reads version 1"),
        ('{"kind": "oases loads", "version": 1}\n{"step": 0}\n', "line 2"),
        ('{"kind": "oases loads", "version": 1}\n{"step": 0, "layer": 0, "counts": [[-1]]}\n', "line 2: counts"),
    ],
)
def test_what_is_no_trace(tmp_path, text, said):
    (tmp_path / "loads.jsonl").write_text(text)
    with pytest.raises(UsageError, match=said):
        list(replay(tmp_path / "loads.jsonl"))


def test_gates_walk_slowly_and_prefer_few():
    steps = list(generate(experts=32, devices=8, tokens=1000, steps=50, concentration=0.1, drift=0.02, seed=5))
    assert all(counts.sum(0).tolist() == [1000] * 8 for counts in steps)
    loads = np.array([counts.sum(1) for counts in steps])
    assert np.sort(loads[0])[-3:].sum() > 0.4 * loads[0].sum()
    assert abs(loads[1] - loads[0]).sum() < 0.1 * loads[0].sum()
    assert abs(loads[-1] - loads[0]).sum() > abs(loads[1] - loads[0]).sum()


def test_bad_sizes():
    with pytest.raises(UsageError, match="devices must be at least 1"):
        list(generate(experts=4, devices=0, tokens=1))
    with pytest.raises(UsageError, match="concentration above 0"):
        list(generate(experts=4, devices=2, tokens=1, concentration=0))
