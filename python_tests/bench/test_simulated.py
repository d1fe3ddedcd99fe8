"""Measured steps beside predicted ones, on two ranks and a profile of made-up times."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from oases import cli
from oases.errors import UsageError
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock
from oases.simulator.hardware_file import write
from oases.simulator.links import LinkModel
from oases.testing import RankPool
from oases_bench.overlap import OverlapBenchConfig, bench_of, measured
from oases_bench.overlap_predictions import compare_predictions, require_predictable, write_comparison

CONFIG = OverlapBenchConfig(
    hidden=32, heads=4, layers=2, sequence=8, batch=4, iterations=1, schedules="sync,oases@2,sync:int8"
)
TIMES = BlockTimes(1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0)
LINK = LinkModel(0.0, 1e6)
HARDWARE = Hardware(
    "made up", Device("CPU", 2**30, {"float32": 1e9}, 1e9, packing_bytes_per_second={"int8": 1e7}), 2, LINK, LINK,
    tuple(MeasuredBlock(kind, 32, 4, 8, "float32", 2, 4.0, TIMES) for kind in ("attention", "mlp")),
)  # fmt: skip


def run():
    group = dist.group.WORLD
    assert group is not None
    bench = bench_of(CONFIG, group)
    (result,) = measured([bench], False)
    return result, compare_predictions(bench, result, HARDWARE)


@pytest.mark.long
def test_every_schedule_has_a_prediction_and_two_timelines(two_ranks: RankPool, tmp_path: Path) -> None:
    result, steps = two_ranks.run(run)[0]
    sent = 4 * 8 * 32 * 4 / 1e6  # seconds of an all-reduce
    assert result["schedules"]["sync"]["predicted_seconds"] == pytest.approx(4 * 3.0 + 8 * sent)
    at_speed = result["schedules"]["sync"]["predicted_at_speed_seconds"]
    assert at_speed == pytest.approx(result["compute_seconds"] + 8 * sent), (
        "compute as it was, the link of the profile"
    )
    assert result["compute_over_profile"] == pytest.approx(result["compute_seconds"] / (4 * 3.0))
    row = result["schedules"]["oases@2"]
    assert row["prediction_error"] == pytest.approx(row["predicted_seconds"] / row["step_seconds"] - 1)
    packed = (1 + 1 / 32) / 4 * sent + (1.5 - 0.5 / 2) * 4 * 8 * 32 * 4 / 1e7
    assert result["schedules"]["sync:int8"]["predicted_seconds"] == pytest.approx(4 * 3.0 + 8 * packed)
    assert [step.name for step in steps] == ["sync", "oases@2", "sync:int8"]
    for step in steps:
        assert {rank for rank, _ in step.measured.lanes} == {0, 1}
        assert step.predicted.lanes == [(0, "compute"), (0, "link")]
    path = tmp_path / "page.html"
    write_comparison(path, result, steps, HARDWARE)
    page = path.read_text()
    for part in ("oases@2, measured", "oases@2, predicted", "predicted from the profile made up"):
        assert part in page


def test_what_cannot_be_predicted() -> None:
    require_predictable(CONFIG, HARDWARE, 2)
    with pytest.raises(UsageError, match=r"'made up' holds no attention block of hidden 64, .* measure it with"):
        require_predictable(replace(CONFIG, hidden=64), HARDWARE, 2)


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "overlap", *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.long
def test_the_command(ranks_at_hand, capfd, tmp_path) -> None:
    profile, result, page = (tmp_path / name for name in ("profile.json", "result.json", "page.html"))
    write(HARDWARE, profile)
    sizes = "--hidden 32 --heads 4 --layers 2 --sequence 8 --batch 4 --iterations 1".split()  # noqa: SIM905
    cli.main(["bench", "overlap", *sizes, "--simulate", str(profile), "--html", str(page), "--json", str(result)])
    assert json.loads(result.read_text())["schedules"]["oases"]["predicted_seconds"] > 0
    assert "predicted beside measured" in capfd.readouterr().out
    assert page.is_file()
    assert "give --simulate PROFILE" in fails(capfd, "--html", str(page))
    assert "'/nowhere' cannot be read: No such file" in fails(capfd, "--simulate", "/nowhere")
    assert "holds no attention block" in fails(capfd, "--simulate", str(profile))
