"""The benchmark of stage-aware recomputation: what it plans, what it reports, and bad input."""

import pytest

from benchmarks.recomputation import RecomputationBenchConfig, run_recomputation_bench
from oases.errors import UsageError
from oases_bench.harness import Ranks

SMALL = RecomputationBenchConfig(
    hidden=64, layers=16, sequence=64, micro_batches=4, kept_layers=1, flops=1e10, iterations=1,
    pipelines="one_f_one_b",
)  # fmt: skip


def test_later_stages_recompute_less():
    plans = RecomputationBenchConfig(kept_layers=1).plans(4)
    layers = {name: [s.segments[0].recomputed_layers for s in plan.stages] for name, plan in plans.items()}
    assert layers["one_f_one_b/full"] == [12] * 4
    assert layers["one_f_one_b/fits"] == [11, 10, 8, 3]


@pytest.mark.slow
def test_memory_is_evened_out(four_ranks):
    rows = four_ranks.run(run_recomputation_bench, SMALL, Ranks(4), False)[0]["schedules"]
    full, fits = rows["one_f_one_b/full"], rows["one_f_one_b/fits"]
    assert abs(fits["last_over_first"] - 1) < 0.1
    assert fits["predicted_speedup"] > 1
    assert max(full["step_bytes_per_stage"]) <= max(fits["step_bytes_per_stage"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 18}, "--layers 18 do not divide"),
        ({"kept_layers": 13}, "--kept-layers must be from 1 to the 12"),
        ({"micro_batches": 3}, "--micro-batches at least the 4"),
        ({"pipelines": "nosuch"}, "nosuch"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(UsageError, match=message):
        RecomputationBenchConfig(**changes).plans(4)
