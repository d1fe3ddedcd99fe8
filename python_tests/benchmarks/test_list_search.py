"""Search over lists: it finds the overlap that a list lacks, and nothing that is not valid."""

from dataclasses import replace

import pytest

from benchmarks.lists import ListsBenchConfig, costs_at, run_lists_bench, searched
from oases.core.schedule import Op, generate
from oases.core.schedule.validate import validate
from oases.simulator.simulate import simulate


def serialised(schedule):
    """The list with every wait right behind its start."""
    ops: list[Op] = []
    for op in schedule:
        if op.kind == "all_reduce":
            ops += [op, next(each for each in schedule if each.kind == "wait" and each.carried == op.carried)]
        elif op.kind != "wait":
            ops.append(op)
    return replace(schedule, ops=tuple(ops))


def test_a_list_that_hides_nothing_is_mended():
    costs = costs_at(1.0, 2, 2, 1.0)
    listed = generate("oases", 2, 2)
    serial = serialised(listed)
    before, known = (simulate(each, costs).total_seconds for each in (serial, listed))
    after, found = searched(serial, costs, 400, 0)
    assert after == simulate(found, costs).total_seconds
    assert after < 0.95 * before
    assert after == pytest.approx(known, rel=0.15)
    validate(found, "block")
    assert sorted(map(str, found)) == sorted(map(str, serial))


def test_the_table_of_short_searches():
    result = run_lists_bench(ListsBenchConfig(blocks=2, moves=5, seeds=1), False)
    assert len(result["cells"]) == 24
    for row in result["cells"]:
        assert row["gain"] == pytest.approx(min(row["generated"].values()) / row["searched"])
        assert row["gain"] >= 1
