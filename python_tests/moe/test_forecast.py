"""Loads of the next step, and placements that stay while they are good enough."""

import numpy as np
import pytest

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.forecast import KEEPS, Forecast, Planner
from oases.moe.placement import make_placement, plan
from oases_bench.loads import generate

COSTS = Costs(token_seconds=2e-6, token_bytes=4096, expert_bytes=8 << 20, bandwidth=12.5e9, non_expert_seconds=1e-3)


def errors_of(steps):
    """Sums of the differences of the forecasts and of each moving average from the steps they predict."""
    forecast, means = Forecast(), [steps[0].astype(float) for _ in KEEPS]
    ours, theirs = 0.0, np.zeros(len(KEEPS))
    forecast.observe(steps[0])
    for counts in steps[1:]:
        ours += np.abs(forecast.counts() - counts).sum()
        theirs += [np.abs(np.rint(mean) - counts).sum() for mean in means]
        means = [keep * mean + (1 - keep) * counts for keep, mean in zip(KEEPS, means, strict=True)]
        forecast.observe(counts)
    return ours, theirs


def test_loads_that_move_are_predicted_by_the_last_step():
    base, moves = np.full((4, 2), 100), np.array([[30, 0], [0, -3], [0, 0], [-5, 0]])
    steps = [base + number * moves for number in range(12)]
    forecast = Forecast()
    for counts in steps:
        forecast.observe(counts)
    assert np.array_equal(forecast.counts(), steps[-1])
    ours, theirs = errors_of(steps)
    assert ours == theirs[0] < min(theirs[1:])


def test_loads_that_fluctuate_are_predicted_by_a_long_average():
    random = np.random.default_rng(0)
    gate = random.dirichlet(np.ones(8))
    steps = [random.multinomial(64, gate, size=4).T for _ in range(80)]
    ours, theirs = errors_of(steps)
    assert theirs.argmin() > 0
    assert ours < 0.9 * theirs[0]
    assert ours < 1.05 * theirs.min()


def test_before_the_first_counts_nothing_is_known():
    forecast = Forecast()
    with pytest.raises(RuntimeError, match="no counts were observed"):
        forecast.counts()
    forecast.observe([[8, 0], [0, 8]])
    with pytest.raises(UsageError, match="counts of"):
        forecast.observe([[1], [1]])


def test_a_placement_stays_while_a_new_one_saves_little():
    steps = list(generate(experts=16, devices=8, tokens=512, steps=60, drift=0.02, seed=1))
    kept = Planner(COSTS, hysteresis=0.1)
    eager = Planner(COSTS, hysteresis=-np.inf)
    for counts in steps:
        kept.next(counts)
        eager.next(counts)
    assert 1 <= kept.changes < eager.changes == len(steps)


def test_a_load_that_turns_round_is_followed():
    planner = Planner(COSTS)
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
    planner = Planner(COSTS)
    first, second = np.full((4, 4), 100), np.full((4, 4), 100)
    first[0], second[3] = 900, 700
    kept = planner.next(first)
    planner.hysteresis = 1.0
    stays = planner.next(second)
    assert stays.copies == kept.copies
    assert planner.changes == 1
    assert stays.device_loads.sum() == second.sum()
    assert stays.predicted_seconds != kept.predicted_seconds


def test_a_forecast_without_tokens_moves_nothing():
    forecast = Forecast()
    forecast.observe([[1, 0], [0, 1]])
    for _ in range(7):
        forecast.observe([[0, 0], [0, 0]])
    assert forecast.counts().tolist() == [[0, 0], [0, 0]]
    assert Planner(COSTS).next([[0, 0], [0, 0]]).moved == ()


def test_what_stays_is_predicted_within_the_hysteresis_of_every_method():
    planner = Planner(COSTS)
    for counts in generate(experts=8, devices=2, tokens=4096, steps=40, drift=0.05, seed=2):
        last = planner.next(counts)
        expected = planner.forecast.counts()
        best = min(
            plan(expected, COSTS, method=method).predicted_seconds
            for method in ("none", "faster_moe", "eplb", "prophet")
        )
        assert (1 - planner.hysteresis) * last.predicted_seconds <= best * (1 + 1e-9)
    assert 0 < planner.changes < 40
