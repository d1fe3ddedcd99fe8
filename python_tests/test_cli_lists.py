"""The command simulate for lists by themselves: every sort, text, page, trace and JSON, and files that are wrong."""

import json

import pytest
from command_line import fails
from plotly.offline import get_plotlyjs

from oases import cli
from oases.core.schedule import format_schedule, generate, generate_pipeline, parse_schedule
from oases.plans.expert_schedules import generate_experts
from oases.simulator import simulate

LISTS = {
    "block": generate("oases", 4, 2, "full"),
    "experts": generate_experts("block_wise", 3, True),
    "stage": generate_pipeline("zb_h1", 3, 6),
}
COSTS = {"block": "F=3,all_reduce=4.5", "experts": "D=2,all_to_all=7", "stage": "B=31"}


@pytest.mark.parametrize("unit", LISTS)
def test_a_list_of_each_sort(capsys, tmp_path, unit):
    schedule, path = LISTS[unit], tmp_path / "list.txt"
    path.write_text(format_schedule(schedule))
    written = {name: tmp_path / name for name in ("json", "html", "trace")}
    given = [argument for name, target in written.items() for argument in (f"--{name}", str(target))]
    cli.main(["simulate", "--schedule", str(path), "--costs", COSTS[unit], *given])
    out = capsys.readouterr().out
    assert f"{schedule.name}, " in out
    found = json.loads(written["json"].read_text())
    seconds = {kind: value / 1e3 for kind, value in found["costs_ms"].items()}
    timeline = simulate(schedule, seconds)
    assert found["step_seconds"] == pytest.approx(timeline.total_seconds)
    assert parse_schedule(found["list"]) == schedule
    assert [row["exposed_seconds"] for row in found["ranks"]] == [
        pytest.approx(timeline.exposed(rank)) for rank in range(schedule.num_stages)
    ]
    for item in COSTS[unit].split(","):
        kind, _, value = item.partition("=")
        assert found["costs_ms"][kind] == float(value)
    who = "stage 2 compute" if unit == "stage" else "rank 0 link"
    assert f"{who} " in out
    assert get_plotlyjs()[:100] in written["html"].read_text()
    assert json.loads(written["trace"].read_text())["traceEvents"]


def test_experts_by_name(capsys, tmp_path):
    path = tmp_path / "out.json"
    cli.main(["simulate", "--schedule", "blocking", "--blocks", "2", "--recompute", "full", "--json", str(path)])
    assert "blocking, 2 blocks of experts, recompute full" in capsys.readouterr().out
    assert parse_schedule(json.loads(path.read_text())["list"]) == generate_experts("blocking", 2, True)


def test_a_list_whose_ops_take_no_time(capsys, tmp_path):
    nothing = "D=0,E=0,P=0,all_to_all=0,share=0,join=0"
    cli.main(["simulate", "--schedule", "plain", "--costs", nothing, "--html", str(tmp_path / "page.html")])
    assert "a step takes 0 ms" in capsys.readouterr().out


def test_what_cannot_be_simulated(capsys, tmp_path):
    path = tmp_path / "list.txt"
    lines = format_schedule(LISTS["stage"]).splitlines()

    def with_file(text, *more):
        path.write_text(text)
        return fails(capsys, "simulate", "--schedule", str(path), *more)

    whole = "\n".join(lines)
    assert "list.txt', line 61, where the file ends: 'W 1.1' is missing" in with_file("\n".join(lines[:61]))
    assert "line 2: op 1 (B 0.0): its input is missing" in with_file("\n".join([lines[0], lines[9], *lines[2:]]))
    assert "line 1, column 1: expected the header" in with_file("nothing")
    assert "--costs Q: ops of pipeline stages that have costs are F, R, B, send, W" in with_file(
        whole, "--costs", "Q=3"
    )
    assert "--costs 'F' is not KIND=MILLISECONDS" in with_file(whole, "--costs", "F")
    assert "--costs F must be from 0 ms" in with_file(whole, "--costs", "F=-1")
    assert "leave out --tp" in with_file(whole, "--tp", "2")
    assert "leave out --cluster" in with_file(whole, "--cluster", "4x3090")
    assert "sets recomputation; leave it out" in with_file(whole, "--recompute", "full")
    experts = format_schedule(LISTS["experts"])
    assert "line 1: it is for 3 blocks, but 4 are required" in with_file(experts, "--blocks", "4")
    assert "takes none or full" in fails(capsys, "simulate", "--schedule", "plain", "--recompute", "2")
    assert "--blocks must be at least 1" in fails(capsys, "simulate", "--schedule", "plain", "--blocks", "0")
    assert "'nosuch' is unknown; known are sync" in fails(capsys, "simulate", "--schedule", "nosuch")
    assert "leave out --costs" in fails(capsys, "simulate", "--schedule", "oases", "--costs", "F=1")


SIZES = ["--hidden", "256", "--heads", "4", "--layers", "4", "--sequence", "128", "--vocabulary", "512"]
GIVEN = [*SIZES, "--cluster", "4x3090", "--global-batch", "24", "--stages", "2", "--micro-batches", "3"]


def test_a_pipeline_of_a_file_is_a_strategy_by_hand(capsys, tmp_path):
    path, out = tmp_path / "pipeline.txt", tmp_path / "out.json"
    found = []
    path.write_text("# by hand\n" + format_schedule(generate_pipeline("zb_h1", 2, 3)))
    for pipeline in ("zb_h1", str(path)):
        cli.main(["simulate", *GIVEN, "--pipeline", pipeline, "--json", str(out)])
        found.append(json.loads(out.read_text()))
        assert "2 pipeline stages (zb_h1)" in capsys.readouterr().out
    assert found[0]["step_seconds"] == found[1]["step_seconds"]
    assert found[0]["stages"] == found[1]["stages"]
    assert parse_schedule(found[1]["plan"]["pipeline"]) == generate_pipeline("zb_h1", 2, 3)
    path.write_text(format_schedule(generate_pipeline("zb_h1", 2, 4)))
    error = fails(capsys, "simulate", *GIVEN, "--pipeline", str(path))
    assert "--pipeline: schedule file" in error
    assert "line 1: it is for 4 micro-batches, but 3 are required" in error
    assert "'nosuch' is unknown; known are gpipe" in fails(capsys, "simulate", *GIVEN, "--pipeline", "nosuch")
