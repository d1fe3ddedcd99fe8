"""The benchmark of placements: its cases, what it sums up, and the published speed-ups."""

import json

import numpy as np
import pytest

from benchmarks.papers.prophet_speedups import (
    DEVICES,
    SPEEDUPS,
    TOKENS,
    Assumptions,
    Row,
    error,
    loads,
    main,
    modelled,
)
from benchmarks.placements import (
    BENCHMARK,
    LAYERS,
    METHODS,
    Case,
    PlacementsBenchConfig,
    generated_cases,
    outcome,
    recorded_cases,
    run_placements_bench,
    summary,
)
from oases.errors import UsageError
from oases_bench.command_line import script
from oases_bench.loads import generate
from oases_train.traces import Recorder

SMALL = PlacementsBenchConfig(devices="4", generated=4, tokens=64, optimum=2, optimum_seconds=20.0)


def test_generated_cases_differ_in_link_and_budget():
    cases = list(generated_cases(PlacementsBenchConfig(generated=40, tokens=64), 4))
    assert len({(case.link, case.memory_budget) for case in cases}) == 8
    assert all(case.counts.sum() == 4 * 64 for case in cases)


def test_prophet_is_above_none_of_the_others():
    outcomes = [outcome(case) for devices in (4, 8, 16) for case in generated_cases(SMALL, devices)]
    assert summary(outcomes)["prophet_above"] == {"none": 0, "faster_moe": 0, "eplb": 0}


def test_the_whole_result(tmp_path):
    result = run_placements_bench(SMALL, shows=False)
    found = result["cases"]["4"]
    assert found["cases"] == 4
    assert found["methods"]["none"]["over_none"] == found["methods"]["none"]["rb"] == 1
    assert found["optimum"]["solved_share"] == 1
    for method in METHODS:
        assert found["optimum"][method]["over_bound_max"] >= 1 - 2e-3
    assert found["optimum"]["prophet"]["over_bound"] <= found["optimum"]["eplb"]["over_bound"]
    json.dumps(result)


def test_rb_is_before_over_after():
    counts = np.full((4, 4), 10)
    counts[0] = 100
    found = outcome(Case("", counts, "100gbit", None))
    after = found.placements["prophet"].device_loads
    assert found.rb("prophet") == pytest.approx(np.std(counts.sum(1)) / np.std(after))
    assert outcome(Case("", np.full((4, 4), 10), "1gbit", None)).rb("prophet") == 1


def test_recorded_steps_are_spread_over_the_trace(tmp_path):
    path = str(tmp_path / "loads.jsonl")
    steps = list(generate(experts=4, devices=2, tokens=50, steps=9, seed=1))
    with Recorder(path) as recorder:
        for step, counts in enumerate(steps):
            for layer in range(2):
                recorder.write(step, layer, counts + layer)
    cases = list(recorded_cases(path, 3))
    assert [case.counts.tolist() for case in cases] == [
        (steps[step] + layer).tolist() for layer in range(2) for step in (0, 4, 8)
    ]
    assert {case.link for case in cases} == set(LAYERS)
    result = run_placements_bench(PlacementsBenchConfig(generated=0, traces=path, steps=3), shows=False)
    assert result["cases"][path]["cases"] == 6
    Recorder(path).close()
    with pytest.raises(UsageError, match="has no step"):
        list(recorded_cases(path, 3))


def test_published_loads_are_those_stated():
    for top_k in (1, 2):
        counts = loads(top_k, Assumptions())
        assert counts.sum() == top_k * TOKENS
        assert counts.sum(0).tolist() == [top_k * TOKENS // DEVICES] * DEVICES
    heaviest = np.sort(loads(1, Assumptions()).sum(1))[-3:]
    assert heaviest.sum() > TOKENS / 2


def test_published_rows_are_all_modelled():
    rows = modelled()
    assert {(row.model, row.top_k) for row in rows} == set(SPEEDUPS)
    assert all(row.modelled >= 1 for row in rows)
    stronger = modelled(Assumptions(own_search=True))
    assert all(ours.modelled >= paper.modelled * (1 - 1e-9) for ours, paper in zip(stronger, rows, strict=True))
    assert error([Row("S", 1, "prophet", 2.0, 1.0), Row("S", 1, "prophet", 1.0, 2.0)]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "8,x"], "'8,x' must be whole numbers"),
        (["--devices", "1"], "at least 2"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--optimum-seconds", "0"], "--optimum-seconds must be above 0"),
        (["--devices", "2", "--generated", "0", "--traces", "nosuch.jsonl"], "'nosuch.jsonl' cannot be read"),
    ],
)
def test_bad_options_exit_with_2(options, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["placements.py", *options])
    with pytest.raises(SystemExit) as ended:
        script(BENCHMARK, "benchmarks/placements.py")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_the_scripts_write_their_json(tmp_path, capsys, monkeypatch):
    path = tmp_path / "placements.json"
    given = ["--devices", "2", "--generated", "2", "--tokens", "16", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["placements.py", *given])
    script(BENCHMARK, "benchmarks/placements.py")
    assert set(json.loads(path.read_text())["cases"]) == {"2"}
    monkeypatch.setattr("sys.argv", ["prophet_speedups.py", "--json", str(path)])
    main()
    assert json.loads(path.read_text())["error"]["all"] > 0
