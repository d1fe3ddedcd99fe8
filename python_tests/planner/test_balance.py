"""Stages cut by time against every cut, and what a stage takes by the layers that it has."""

import itertools
import random
from contextlib import suppress

import pytest

from oases.core.schedule import PIPELINES
from oases.planner import NoPlanError, Predictor, Space, rank_plans
from oases.planner.balance import StageLoad, balanced, part_blocks
from oases.planner.choose import neighbours
from oases.planner.search import SettingSearch
from oases.planner.space import BEST_PIPELINES, Setting, settings
from oases.planner.timings import StackTimings
from oases.plans.balance import balanced_starts
from oases.plans.gpt import gpt
from oases.simulator.cluster import cluster_called


def cuts(layers, stages, least):
    for counts in itertools.product(range(least, layers + 1), repeat=stages):
        if sum(counts) == layers:
            yield counts


def drawn(rng):
    """The load of a stage of any kind."""
    layer = rng.uniform(0.5, 1.5)
    return StageLoad(
        layer, layer * rng.uniform(1, 1.4), rng.choice([0, rng.uniform(0, 3)]), rng.uniform(2, 8),
        rng.uniform(0.1, 2), rng.uniform(0, 5), rng.uniform(5, 40),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_run_of_costs_is_least(seed):
    draw = random.Random(seed)
    costs = [draw.choice((0, 0, 1, 2, 3, 10)) * draw.random() for _ in range(draw.randint(1, 9))]
    for count in range(1, len(costs) + 1):
        starts = balanced_starts(costs, count)
        assert len(starts) == count - 1
        assert all(a < b for a, b in itertools.pairwise([0, *starts, len(costs)]))
        best = min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *some, len(costs)]))
            for some in itertools.combinations(range(1, len(costs)), count - 1)
        )
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *starts, len(costs)])) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_has_a_smaller_largest_load(seed):
    rng = random.Random(seed)
    stages, least = rng.choice([1, 2, 3, 4]), rng.choice([1, 2])
    layers = stages * least + rng.randint(0, 5)
    loads = [drawn(rng).seconds for _ in range(stages)]
    found = balanced(layers, loads, least)
    assert sum(found) == layers
    assert min(found) >= least

    def largest(counts):
        return max(load(count) for load, count in zip(loads, counts, strict=True))

    assert largest(found) == min(map(largest, cuts(layers, stages, least)))


@pytest.mark.parametrize("seed", range(60))
def test_loads_grow_and_keep_as_many_layers_as_fit(seed):
    load = drawn(random.Random(seed))
    seconds = [load.seconds(layers) for layers in range(1, 30)]
    assert seconds == sorted(seconds)
    for layers in range(1, 30):
        keeping = [
            k
            for k in range(layers + 1)
            if load.held_bytes + k * load.kept_bytes + (layers - k) * load.recomputed_bytes <= load.capacity
        ]
        if keeping:
            recomputed = layers - max(keeping)
            expected = load.fixed_seconds + max(keeping) * load.layer_seconds + recomputed * load.recomputed_seconds
            assert load.seconds(layers) == pytest.approx(expected)


def test_the_middle_has_more_where_it_makes_no_difference():
    assert balanced(10, [float] * 4) == [2, 3, 3, 2]
    assert balanced(7, [float] * 3) == [2, 3, 2]


MODEL = gpt(hidden=256, layers=14, heads=4, sequence=128, vocabulary=16384)
HARDWARE, WORLD = cluster_called("4x3090")


def search_of(pipeline="one_f_one_b", model=MODEL):
    space = Space(degrees=(1,), schedules=("oases",), sub_batches=(2,))
    setting = Setting(WORLD, 64, 4, 8, False, pipeline)
    return SettingSearch(setting, StackTimings(model, HARDWARE, space), 2**34, Predictor(HARDWARE))


@pytest.mark.parametrize("pipeline", ["one_f_one_b", "shifted_critical_path"])
def test_the_stage_of_the_head_has_fewer_layers_and_no_cut_is_much_faster(pipeline):
    """Single steps, layers handed from stage to stage, look at how the pipeline fills and drains besides."""
    search, predictor = search_of(pipeline), Predictor(HARDWARE)
    blocks = search.stage_blocks((1,))
    assert blocks[-1] < min(blocks[:-1])

    def plan_of(counts):
        return search.plan_of(tuple(((1, False),) * count for count in counts))

    def seconds(counts):
        return predictor.predict(plan_of(counts)).step_seconds

    best = min(([2 * count for count in counts] for counts in cuts(14, 4, 1)), key=seconds)
    assert seconds(blocks) <= 1.03 * seconds(best)
    assert seconds([8, 6, 6, 8]) > 1.1 * seconds(blocks), "as even as layers come"
    steps = [[stage.num_blocks for stage in plan.stages] for plan in neighbours(plan_of(blocks), search)]
    assert [6, 10, 8, 4] in steps
    assert [8, 8, 6, 6] in steps


def test_a_head_that_takes_no_time_leaves_even_stages():
    search = search_of(model=gpt(hidden=256, layers=14, heads=4, sequence=128, vocabulary=4))
    assert sorted(search.stage_blocks((1,))) == [6, 6, 8, 8]


def test_the_parts_of_an_interleaved_stage_are_whole_layers():
    assert part_blocks(10, 2) == [6, 4]
    search = search_of("interleaved")
    plan = search.plan_of(
        tuple(((1, True),) * 2 + ((1, False),) * (count - 2) for count in search.stage_blocks((1,)))
    )
    assert all(part.first_block % 2 == 0 for part in plan.parts)
    assert [sum(s.recomputed_layers for s in stage.segments) for stage in plan.stages] == [1] * 4
    assert len(plan.parts) == 8


SMALL = gpt(hidden=256, layers=8, heads=4, sequence=128, vocabulary=512)


def test_a_search_tries_the_pipelines_that_can_win():
    space = Space(degrees=(1,), micro_batches=(8,), zero=(False,), max_stages=4)
    found = {(each.stages, each.pipeline) for each in settings(SMALL, HARDWARE, 4, 64, space)}
    two = {(2, name) for name in BEST_PIPELINES if name != "shifted_critical_path"}
    assert found == {(1, "one_f_one_b"), *two, *((4, name) for name in BEST_PIPELINES)}


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_the_chosen_pipeline_is_the_best_of_all(share):
    """share: of the memory that the fastest plan without a budget needs."""
    degrees = {"degrees": (1,), "micro_batches": (8,), "zero": (False,), "max_stages": 4}
    names = ("one_f_one_b", "zb_h1")
    alone = {name: rank_plans(SMALL, HARDWARE, 4, 64, space=Space(**degrees, pipelines=(name,))) for name in names}
    assert {plan.pipeline for plan in alone["zb_h1"] if len(plan.stages) > 1} == {"zb_h1"}
    piped = [plan for plan in alone["one_f_one_b"] if len(plan.stages) == 4]
    budget = int(share * max(piped[0].prediction.memory_bytes))
    best = {}
    for name in PIPELINES:
        with suppress(NoPlanError):
            best[name] = rank_plans(SMALL, HARDWARE, 4, 64, budget=budget, space=Space(**degrees, pipelines=(name,)))[
                0
            ]
    assert len(best) >= len(BEST_PIPELINES)
    chosen = rank_plans(SMALL, HARDWARE, 4, 64, budget=budget, space=Space(**degrees))[0]
    assert max(chosen.prediction.memory_bytes) <= budget
    assert chosen.hands_on
    least = min(plan.prediction.step_seconds for plan in best.values())
    assert chosen.prediction.step_seconds <= 1.005 * least
