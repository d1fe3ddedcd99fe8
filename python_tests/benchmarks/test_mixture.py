"""Training under every placement, in turn: the same losses, and what is said of each."""

import pytest

from benchmarks.mixture import BENCHMARK, LOADS, MixtureBenchConfig, run_mixture_bench, shown
from oases.errors import UsageError
from oases_bench.command_line import script
from oases_bench.harness import Ranks

SMALL = MixtureBenchConfig(
    layers=1, hidden=32, heads=2, sequence=32, batch=4, experts=4, expert_hidden=64, skew=1.0, warmup=1, iterations=2,
    methods="none,faster_moe,eplb,prophet,prophet",
)  # fmt: skip


@pytest.mark.slow
def test_every_placement_trains_alike(two_ranks):
    result = two_ranks.run(run_mixture_bench, SMALL, Ranks(), False)[0]
    assert result["config"]["ranks"] == 2
    for load in LOADS:
        assert list(result[load]) == ["none", "faster_moe", "eplb", "prophet", "prophet, again"]
        for row in result[load].values():
            assert row["loss_difference"] < 1e-4
            assert len(row["steps"]) == 2
        assert result[load]["none"]["copies"] == 0
        assert result[load]["none"]["speedup"] == 1
        assert result[load]["none"]["prediction_error"] == 0
        one, other = result[load]["prophet"], result[load]["prophet, again"]
        assert (one["copies"], one["modelled"]) == (other["copies"], other["modelled"]), "by the same costs"
    assert result["forced"]["none"]["balance_degree"] > 2 * result["natural"]["none"]["balance_degree"]
    (costs,) = result["costs"]
    assert costs["token_seconds"] > 0
    (table,) = shown(result)
    assert table.row_count == 5 * len(LOADS)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"methods": "none,best"}, "--methods 'best'"), ({"loads": "odd"}, "--loads 'odd'"), ({"skew": -1.0}, "--skew"),
     ({"warmup": 0}, "--warmup"), ({"experts": 3}, "3 experts do not divide")],
)  # fmt: skip
def test_bad_values_are_named(options, said):
    with pytest.raises(UsageError, match=said):
        MixtureBenchConfig(**options).check(2)


def test_the_command_refuses_before_ranks_start(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mixture.py", "--loads", "odd"])
    with pytest.raises(SystemExit) as ended:
        script(BENCHMARK, "benchmarks/mixture.py")
    assert ended.value.code == 2
    assert "--loads 'odd' is unknown; known are natural, forced, even" in capsys.readouterr().err
