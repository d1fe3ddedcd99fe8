"""The benchmark of placements of experts: what it reports, recorded loads, bad input. Its times say nothing here."""

import json
from dataclasses import replace

import numpy as np
import pytest

from oases.errors import UsageError
from oases_bench.harness import Ranks
from oases_bench.loads import PLACEMENT_METHODS
from oases_bench.moe import ABLATION, ExpertsBenchConfig, run_experts_bench, shown
from oases_train.traces import Recorder

SMALL = ExpertsBenchConfig(
    blocks=2, experts=4, hidden=16, intermediate=32, tokens=24, token_us=1.0, non_expert_ms=0.1, warmup=1,
    iterations=1, ablation=True,
)  # fmt: skip
SKEWED = np.array([[8, 4], [0, 0], [0, 1], [0, 3]])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "loads.jsonl"
    with Recorder(path) as recorder:
        for step in range(3):
            for layer in range(3):
                recorder.write(step, layer, SKEWED if layer else np.roll(SKEWED, step, 0))
    return str(path)


@pytest.mark.long
def test_every_placement_has_its_row_under_every_load(two_ranks, trace):
    config = replace(SMALL, trace=trace).prepared(Ranks(2))
    result = two_ranks.run(run_experts_bench, config, Ranks(2), False)[0]
    for kind in ("skewed", "recorded", "even"):
        assert list(result[kind]) == list(PLACEMENT_METHODS)
        assert list(result["ablation"][kind]) == list(ABLATION)
    assert result["recorded"]["none"]["balance_degree"] == 24  # 72 of 96 slots on a rank
    assert result["even"]["eplb:overlap"]["balance_degree"] == 0
    (table,) = shown(json.loads(json.dumps(result)))
    assert table.row_count == 3 * (len(PLACEMENT_METHODS) + len(ABLATION))


def test_recorded_loads_are_those_of_the_last_steps_in_proportion(trace):
    loads = replace(SMALL, trace=trace, tokens=13, blocks=4).recorded(2)
    assert len(loads) == 2
    for step, blocks in enumerate(loads, 1):
        assert len(blocks) == 4
        assert [counts.sum(0).tolist() for counts in blocks] == [[26, 26]] * 4
        assert blocks[1].tolist() == [[26, 13], [0, 0], [0, 3], [0, 10]]
        assert blocks[0].tolist() == np.roll(blocks[1], step, 0).tolist() == blocks[3].tolist()


@pytest.mark.parametrize(
    ("changes", "ranks", "why"),
    [
        ({"experts": 8}, 2, "has 4 experts on 2 ranks; give --experts 4 and as many ranks"),
        ({}, 4, "has 4 experts on 2 ranks"),
        ({"iterations": 3}, 2, "has 3 steps; lower --warmup and --iterations, together 4"),
        ({"trace": "/nowhere"}, 2, "/nowhere"),
        ({"methods": "eplb:fast"}, 2, "eplb:fast"),
    ],
)
def test_wrong_use_is_named(trace, changes, ranks, why):
    with pytest.raises(UsageError, match=why):
        replace(SMALL, **{"trace": trace, **changes}).prepared(Ranks(ranks))
