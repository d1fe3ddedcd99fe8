"""Summary that the planner benchmark makes of its runs."""

import pytest

from benchmarks.planner import PlannerBenchConfig, compare
from oases.errors import UsageError


def run(schedule, measured, predicted, **changed):
    sizes = {"link": "1gbit", "hidden": 64, "layers": 2, "sequence": 8, "batch": 4, "recompute": "none"}
    return {**sizes, "schedule": schedule, "measured_seconds": measured, "predicted_seconds": predicted, **changed}


def test_errors_and_orders_are_counted():
    result = compare(
        [
            run("sync", 1.0, 1.1),
            run("oases", 0.8, 0.8),
            run("cross_pass", 0.79, 0.9),  # within 5 % of oases: no pair; against sync in order
            run("sync", 0.5, 0.4, hidden=128),
            run("oases", 0.4, 0.5, hidden=128),  # out of order, and no pair with the other model's
        ]
    )
    assert result["pairs"] == 3
    assert result["pairs_ordered_right"] == pytest.approx(2 / 3)
    assert result["worst_error"] == pytest.approx(0.25)
    assert result["median_error"] == pytest.approx(0.9 / 0.79 - 1)
    assert [row["error"] for row in result["runs"]][1] == 0


def test_one_run_has_no_pairs():
    assert compare([run("sync", 1.0, 1.0)])["pairs_ordered_right"] == 1.0


def test_shapes_are_read_and_refused():
    models = PlannerBenchConfig(shapes="128x2x16x4, 256x1x8x2").models()
    assert [(m.hidden, m.layers, m.sequence, m.batch, m.recompute) for m in models] == [
        (128, 2, 16, 4, "none"), (128, 2, 16, 4, "full"), (256, 1, 8, 2, "none"), (256, 1, 8, 2, "full"),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="'64x2x16' is not HIDDENxLAYERSxSEQUENCExBATCH"):
        PlannerBenchConfig(shapes="64x2x16").models()
