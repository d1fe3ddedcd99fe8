"""Loads of the next step, and placements that stay while they are good enough."""

import numpy as np
import pytest

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.forecast import Forecast, Planner
from oases.moe.traces import generate

COSTS = Costs(token_seconds=2e-6, token_bytes=4096, expert_bytes=8 << 20, bandwidth=12.5e9, non_expert_seconds=1e-3)


def test_the_mean_moves_by_what_is_not_kept():
    forecast = Forecast(keep=0.75)
    forecast.observe([[8, 0], [0, 8]])
    forecast.observe([[0, 0], [16, 8]])
    assert forecast.counts().tolist() == [[6, 0], [4, 8]]
    with pytest.raises(UsageError, match="counts of"):
        forecast.observe([[1], [1]])


def test_before_the_first_counts_nothing_is_known():
    with pytest.raises(RuntimeError, match="no counts were observed"):
        Forecast().counts()
    with pytest.raises(UsageError, match="keep must be"):
        Forecast(keep=1.0)


def test_a_placement_stays_while_a_new_one_saves_little():
    steps = list(generate(experts=16, devices=8, tokens=512, steps=60, drift=0.02, seed=1))
    kept = Planner(COSTS, hysteresis=0.1)
    eager = Planner(COSTS, hysteresis=-np.inf)
    for counts in steps:
        kept.next(counts)
        eager.next(counts)
    assert 1 <= kept.changes < eager.changes == len(steps)


def test_a_load_that_turns_round_is_followed():
    planner = Planner(COSTS, forecast=Forecast(keep=0.5))
    first, second = np.full((8, 8), 10), np.full((8, 8), 10)
    first[0] += 500
    second[7] += 500
    for _ in range(5):
        assert 0 in planner.next(first).moved
    for _ in range(8):
        last = planner.next(second)
    assert 7 in last.moved
    assert 0 not in last.moved
