"""Loads of the next step, and placements that stay while they are good enough."""

import numpy as np
import pytest

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.forecast import Forecast, Planner
from oases.moe.placement import make_placement
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
    before = planner.current
    for _ in range(8):
        last = planner.next(second)
    assert 7 in last.moved
    assert last.device_loads.max() < 1.1 * last.device_loads.mean()
    stale = make_placement("prophet", second, COSTS, (before.routes, before.copies))
    assert stale.device_loads.max() > 2 * last.device_loads.max()


def test_an_expert_without_tokens_for_a_hundred_steps():
    planner = Planner(COSTS)
    counts = np.full((8, 8), 40)
    counts[0] += 400
    counts[5] = 0
    for _ in range(100):
        last = planner.next(counts)
    assert last.copies[5] == ()
    assert last.device_loads.sum() == counts.sum()
    counts[5] = 800
    for _ in range(60):
        last = planner.next(counts)
    assert 5 in last.moved


def test_what_stays_tells_its_loads_under_the_new_counts():
    planner = Planner(COSTS, forecast=Forecast(keep=0.0))
    first, second = np.full((4, 4), 100), np.full((4, 4), 100)
    first[0], second[3] = 900, 700
    kept = planner.next(first)
    planner.hysteresis = 1.0
    stays = planner.next(second)
    assert stays.copies == kept.copies
    assert planner.changes == 1
    assert stays.device_loads.sum() == second.sum()
    assert stays.predicted_seconds != kept.predicted_seconds


def test_a_forecast_of_less_than_half_a_token_is_none():
    forecast = Forecast(keep=0.9)
    forecast.observe([[1, 0], [0, 1]])
    for _ in range(7):
        forecast.observe([[0, 0], [0, 0]])
    assert forecast.counts().tolist() == [[0, 0], [0, 0]]
    assert Planner(COSTS).next([[0, 0], [0, 0]]).moved == ()
