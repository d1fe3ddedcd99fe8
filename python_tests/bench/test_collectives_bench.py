"""The benchmark of collectives: every operation over both backends, and what it refuses."""

import pytest

from oases.errors import UsageError
from oases_bench.collectives import BACKENDS, OPERATIONS, CollectivesBenchConfig, run_collectives_bench, shown
from oases_bench.harness import Ranks


def test_every_operation_over_both_backends(two_ranks):
    operations = ",".join((*OPERATIONS, "all_reduce"))
    config = CollectivesBenchConfig(operations=operations, kilobytes="1,300,1", iterations=1)
    result = two_ranks.run(run_collectives_bench, config, Ranks(), False)[0]
    rows = [(row["operation"], row["bytes"] >> 10, row["backend"]) for row in result["collectives"]]
    assert rows == [(name, size, backend) for name in OPERATIONS for size in (1, 300) for backend in BACKENDS]
    for row in result["collectives"]:
        share = 1.0 if row["operation"] == "all_reduce" else 0.5
        assert row["bus_bytes_per_second"] * row["seconds"] == pytest.approx(share * row["bytes"])
    (table,) = shown(result)
    assert table.row_count == 2 * len(OPERATIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "sum"}, "--operations 'sum' is unknown"),
        ({"kilobytes": "64,x"}, "must be positive numbers"),
        ({"kilobytes": ","}, "names no size"),
        ({"kilobytes": "16777216"}, "needs at least 51.5 GB"),
        ({"iterations": 0}, "--iterations must be at least 1"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(UsageError, match=message):
        CollectivesBenchConfig(**options)
    with pytest.raises(UsageError, match="leave out --link"):
        CollectivesBenchConfig().prepared(Ranks(link="1gbit"))
