"""Sweeps: what each panel holds, and its pictures."""

import json
import math
from dataclasses import replace

import pytest
from plotly.offline import get_plotlyjs

from benchmarks import sweep as sweeps
from benchmarks.sweep import Problem, faster, main, sweep
from oases.planner import choose
from oases.planner.space import Space
from oases.plans.gpt import gpt
from oases.simulator.cluster import cluster_called
from oases.simulator.links import Sample

MODEL = gpt(hidden=256, layers=2, heads=4, sequence=128, vocabulary=512)
SMALL = Space(schedules=("oases",), sub_batches=(2,), micro_batches=(1,), zero=(False,))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(choose, "STEPS", 40)


def problem(**changes):
    hardware, world = cluster_called("4x3090")
    return Problem(**({"model": MODEL, "hardware": hardware, "world": world, "global_batch": 16} | changes))


@pytest.mark.long
def test_every_panel_has_every_series():
    told = []
    panels = sweep(problem(space=SMALL), lambda done, total: told.append((done, total)))
    assert [(panel.name, len(panel.x)) for panel in panels] == [("link_speed", 7), ("degree", 3), ("size", 4)]
    for panel in panels:
        for points in panel.points.values():
            assert len(points) == len(panel.x)
            assert all(point.step_seconds > 0 for point in points)
    assert told[-1] == (42, 42)
    speed, degree, _ = panels
    assert panels[2].x[1] * 1e9 == MODEL.num_parameters
    for series in ("sync", "oases", "planner"):
        seconds = [point.step_seconds for point in speed.points[series]]
        assert seconds == sorted(seconds, reverse=True), "faster links, shorter steps"
    assert len({point.step_seconds for point in degree.points["planner"]}) == 1, "its choice is free"
    assert "tp 4 x dp 1 (sync" in degree.points["sync"][2].plan


@pytest.mark.slow
def test_what_does_not_fit_is_a_gap():
    panels = sweep(problem(space=replace(SMALL, recompute=False), budget=20 * 2**20))
    assert panels[1].points["oases"][0].step_seconds is None
    assert "no plan fits" in panels[1].points["oases"][0].plan


def test_faster_links_keep_their_start_up():
    hardware = problem().hardware
    samples = (Sample("all_reduce", 2, 1000, 5.0), Sample("all_reduce", 2, 10, 0.5))
    node = replace(hardware.node, startup_seconds=1.0, samples=samples)
    found = faster(replace(hardware, node=node), 4.0)
    assert [sample.seconds for sample in found.node.samples] == [2.0, 0.5]
    assert found.node.bytes_per_second == 4 * node.bytes_per_second
    assert found.cluster.startup_seconds == hardware.cluster.startup_seconds


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweeps, "SPEEDS", (0.5, 1.0))
    monkeypatch.setattr(sweeps, "SIZES", (1.0, 2.0))
    folder = tmp_path / "new"
    sizes = "--hidden 256 --heads 4 --layers 2 --sequence 128 --vocabulary 512".split()  # noqa: SIM905
    given = [*sizes, "--cluster", "2x3090", "--global-batch", "8", "--no-zero"]
    main([*given, "--out", str(folder)])
    data = json.loads((folder / "sweep.json").read_text())
    assert [panel["name"] for panel in data["panels"]] == ["link_speed", "degree", "size"]
    assert all(math.isfinite(point["step_seconds"]) for point in data["panels"][0]["points"]["oases"])
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "sweep.html").read_text()
    assert "http" not in page.replace(get_plotlyjs(), ""), "the page must open without a network"
    (tmp_path / "file").touch()
    for more, message in (
        (["--out", str(tmp_path / "file")], "a file is in the way"),
        (["--out", str(folder), "--memory", "1MiB"], "no plan fits"),
        (["--out", "/dev/null/there"], "/dev/null/there"),
        (["--out", ""], "--out '' is empty"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([*given, *more])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
