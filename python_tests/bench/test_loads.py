"""A trace of loads, looked at: placements replayed over it step by step, a table, a page."""

import json
from dataclasses import replace

import numpy as np
import pytest

from oases.cli import main
from oases.errors import UsageError
from oases.moe.placement import make_placement, plan
from oases_bench.harness import Ranks
from oases_bench.loads import LoadsConfig, generate, read_loads, replay_placement, run_loads
from oases_train.traces import Recorder

CONFIG = LoadsConfig(hidden=64, token_us=50.0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "loads"
    layers = [list(generate(experts=8, devices=4, tokens=400, steps=12, seed=seed)) for seed in (0, 1)]
    with Recorder(path) as recorder:
        for step in range(12):
            for layer, counts in enumerate(layers):
                recorder.write(step, layer, counts[step])
    return path


def test_a_step_is_computed_with_what_was_planned_before_it(trace):
    loads = read_loads(trace)
    found = replay_placement(loads, CONFIG, "faster_moe")
    assert found.copies[0] == 0  # nothing was known
    assert found.balance_after[0] == pytest.approx(found.balance_before[0])
    costs = CONFIG.costs.__class__(**vars(CONFIG.costs) | {"scheduled": False})
    after, copies = [], 0
    for layer in (0, 1):
        placed = plan(loads[0][layer], costs, method="faster_moe")
        now = make_placement("faster_moe", loads[1][layer], costs, (placed.routes, placed.copies))
        after.append(now.balance_degree)
        copies += sum(map(len, placed.copies))
    assert found.balance_after[1] == pytest.approx(np.mean(after))
    assert found.copies[1] == copies > 0


def test_placements_are_compared(trace):
    result = run_loads(replace(CONFIG, trace=str(trace)))
    assert (result["steps"], result["layers"], result["experts"], result["devices"]) == (12, 2, 8, 4)
    rows = result["methods"]
    assert list(rows) == ["none", "faster_moe", "eplb", "prophet"]
    assert rows["none"]["rb"] == rows["none"]["speedup"] == 1
    assert rows["none"]["copies"] == 0
    assert rows["prophet"]["rb"] > 1
    assert rows["prophet"]["speedup"] > 1
    assert len(rows["prophet"]["over_time"]["seconds"]) == 12
    kept = run_loads(replace(CONFIG, trace=str(trace), methods="prophet", expert_memory=0))["methods"]
    assert list(kept) == ["none", "prophet"]
    assert kept["prophet"]["copies"] == 0


def test_the_command_prints_draws_and_writes(trace, tmp_path, capsys):
    page, found = tmp_path / "loads.html", tmp_path / "loads.json"
    main(["bench", "loads", "--trace", str(trace), "--hidden", "64", "--html", str(page), "--json", str(found)])
    printed = capsys.readouterr().out
    assert "12 steps of 2 layers: 8 experts on 4 ranks" in printed
    assert "prophet" in printed
    text = page.read_text()
    for heading in ("Balance", "Copies", "Time saved", "Load of the experts of layer 1"):
        assert f"<h2>{heading}</h2>" in text
    assert json.loads(found.read_text())["methods"]["prophet"]["rb"] > 1


def test_a_last_step_that_was_cut_off_is_left_out(trace, tmp_path):
    lines = trace.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut"
    cut.write_text("".join(lines[:-1]))
    assert len(read_loads(cut)) == 11
    del lines[5]
    cut.write_text("".join(lines))
    with pytest.raises(UsageError, match=r"step 2 has layers \[1\], others have \[0, 1\]"):
        read_loads(cut)
    cut.write_text(lines[0])
    with pytest.raises(UsageError, match="holds no steps"):
        read_loads(cut)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trace": ""}, "Give --trace FILE"),
        ({"methods": "none,best"}, "--methods 'best' is unknown"),
        ({"hidden": 0}, "--hidden must be at least 1"),
        ({"link": "fast"}, "unknown link rate 'fast'"),
        ({"expert_memory": -2}, "--expert-memory must be at least -1"),
        ({"token_us": -1.0}, "token_seconds must be at least 0"),
    ],
)
def test_what_cannot_be_is_named(changes, told):
    with pytest.raises(UsageError, match=told):
        LoadsConfig(**{"trace": "loads", **changes}).prepared(Ranks(1))
