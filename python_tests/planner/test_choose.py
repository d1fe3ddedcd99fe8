"""The chosen plan against every plan there is, the budget, and what a refusal says."""

import functools
import itertools
import re
from dataclasses import replace

import pytest

from oases.errors import UsageError
from oases.planner import NoPlanError, Plan, Predictor, Segment, Space, Stage, plan, rank_plans
from oases.planner.choose import BORDER, seconds_of
from oases.planner.search import SettingSearch
from oases.planner.space import settings
from oases.plans.gpt import MODELS, gpt, resized
from oases.simulator.cluster import cluster_called
from oases.simulator.hardware import Device, Hardware, LinkModel
from oases.simulator.program import Contention

MODEL = gpt(hidden=1024, layers=2, heads=16, sequence=512, vocabulary=4096, name="small")
WORLD, BATCH = 4, 16
SPACE = Space(degrees=(1, 2, 4), schedules=("oases",), sub_batches=(2,), micro_batches=(1,), zero=(False,))
GIB = 2**30


def hardware(link_scale=1.0, contention=1.0):
    found, _ = cluster_called("4x3090")
    link = replace(
        found.node, bytes_per_second=link_scale * found.node.bytes_per_second,
        contention=Contention(contention, contention),
    )  # fmt: skip
    return replace(found, node=link)


def every_plan():
    """All mixes of degrees over the blocks, with every number of recomputed layers in each segment."""
    for degrees in itertools.product(SPACE.degrees, repeat=MODEL.num_blocks):
        runs = [(tp, len(list(run))) for tp, run in itertools.groupby(degrees)]
        for layers in itertools.product(*(range((count + 1) // 2 + 1) for _, count in runs)):
            segments = tuple(
                Segment(count, tp, *(("fine_grained", 1) if tp == 1 else ("oases", 2)), again)
                for (tp, count), again in zip(runs, layers, strict=True)
            )
            yield Plan(MODEL, WORLD, 4, BATCH, 1, (Stage(segments),))


@functools.cache
def every_prediction(link_scale, contention):
    predictor = Predictor(hardware(link_scale, contention))
    return [predictor.with_prediction(each) for each in every_plan()]


WORLDS = list(itertools.product([1.0, 1.3], [None, 0.85, 0.7], [0.1, 1.0, 20.0]))


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(  # every second one; all pairs are among them
    ("contention", "share", "link_scale"),
    [pytest.param(*each, marks=[pytest.mark.slow] if number % 2 else []) for number, each in enumerate(WORLDS)],
)
def test_the_chosen_plan_is_the_best_of_all(link_scale, share, contention):
    """share: of the memory of the fastest plan without a budget."""
    cluster = hardware(link_scale, contention)
    everyone = every_prediction(link_scale, contention)
    fastest = min(everyone, key=seconds_of)
    budget = None if share is None else int(share * max(fastest.prediction.memory_bytes))
    fitting = [each for each in everyone if budget is None or max(each.prediction.memory_bytes) <= budget]
    chosen = rank_plans(MODEL, cluster, WORLD, BATCH, budget=budget, space=SPACE)[0]
    assert budget is None or max(chosen.prediction.memory_bytes) <= budget

    def cost(each):  # a border between degrees has to pay for itself
        return seconds_of(each) * (1 + BORDER) ** (len(each.stages[0].segments) - 1)

    best = min(fitting, key=cost)
    near = seconds_of(chosen) <= 1.005 * seconds_of(best) or cost(chosen) <= 1.005 * cost(best)
    assert near, f"{chosen.text()} chosen, {best.text()} is better"


@pytest.mark.slow
def test_plans_are_ranked_and_predicted_as_the_predictor_says():
    cluster = hardware()
    plans = rank_plans(MODEL, cluster, WORLD, BATCH, budget=2 * GIB)
    predictor = Predictor(cluster)
    for each in plans:
        assert each.prediction == predictor.predict(replace(each, prediction=None))
        assert max(each.prediction.memory_bytes) <= 2 * GIB
    assert seconds_of(plans[0]) <= 1.02 * min(map(seconds_of, plans))


@pytest.mark.slow
def test_progress_is_told():
    told = []
    rank_plans(
        MODEL, hardware(), WORLD, BATCH, space=SPACE, on_setting=lambda done, total: told.append((done, total))
    )
    assert told
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= total for done, total in told)


@pytest.mark.slow
def test_a_refusal_names_what_would_fit():
    space = Space(degrees=(1, 2), recompute=False, zero=(False,), micro_batches=(1,))
    given = {"world": WORLD, "global_batch": 64, "budget": 5 * GIB // 4, "space": space}
    with pytest.raises(
        NoPlanError, match=r"no plan fits: small with 29\.9 million parameters on 4 devices"
    ) as caught:
        rank_plans(MODEL, hardware(), **given)
    remedies = {
        "recomputation (leave out --no-recompute)": {"space": replace(space, recompute=True)},
        "a global batch of 32 instead of 64": {"global_batch": 32},
        "8 devices instead of 4": {"world": 8},
    }
    offered = [remedy for remedy in remedies if remedy in str(caught.value)]
    assert len(offered) == 3, caught.value
    assert "GiB per device" in str(caught.value)
    for remedy in offered:
        found = rank_plans(MODEL, hardware(), **(given | remedies[remedy]))
        assert max(found[0].prediction.memory_bytes) <= 5 * GIB // 4


ONE_WAY = Space(degrees=(1,), micro_batches=(2,), fsdp=(False,))


@pytest.mark.parametrize(
    ("switched_off", "remedy"),
    [
        ({"recompute": False}, "recomputation (leave out --no-recompute)"),
        ({"zero": (False,)}, "a sharded optimizer (leave out --no-zero)"),
    ],
)
def test_a_refusal_offers_what_was_switched_off(switched_off, remedy):
    smallest = Plan(MODEL, WORLD, 4, 32, 2, (Stage((Segment(4, 1, "fine_grained", 1, 2),)),), zero=True)
    needs = max(Predictor(hardware()).predict(smallest).memory_bytes)
    found = rank_plans(MODEL, hardware(), WORLD, 32, budget=int(1.01 * needs), space=ONE_WAY)
    assert max(found[0].prediction.memory_bytes) <= 1.01 * needs
    with pytest.raises(NoPlanError) as caught:
        rank_plans(MODEL, hardware(), WORLD, 32, budget=int(1.01 * needs), space=replace(ONE_WAY, **switched_off))
    assert remedy in str(caught.value)


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(UsageError, match="cannot divide 1 samples and the model's 15 heads over 4 ranks"):
        rank_plans(resized(MODEL, hidden=960, heads=15), hardware(), WORLD, 1)


def test_plan_takes_models_and_clusters_by_name(monkeypatch):
    monkeypatch.setattr("oases.planner.choose.STEPS", 40)  # the plan need not be good
    found = plan("gpt-125m", "2x3090", global_batch=4, sequence=256)
    assert (found.world, found.global_batch, found.model.sequence) == (2, 4, 256)
    with pytest.raises(UsageError, match="unknown model 'gpt-0'"):
        plan("gpt-0", "2x3090", global_batch=4)
    with pytest.raises(UsageError, match="model int has no hidden, layers, heads, sequence"):
        plan(3, "2x3090", global_batch=4)


def test_degrees_that_do_not_nest_are_refused():
    with pytest.raises(
        UsageError, match=r"degrees 2 and 3 do not nest.*; give degrees of which one divides the next"
    ):
        Space(degrees=(3, 2))


@pytest.mark.parametrize("name", ["degrees", "sub_batches", "micro_batches"])
def test_what_is_chosen_from_counts_something(name):
    with pytest.raises(UsageError, match=f"{name} must be whole numbers of at least 1, got 0"):
        Space(**{name: (1, 0)})


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("batch", [8, 16])
def test_what_a_refusal_promises_is_enough(batch):
    model = gpt(hidden=512, layers=3, heads=4, sequence=128)
    with pytest.raises(NoPlanError) as refused:
        rank_plans(model, hardware(), WORLD, batch, budget=2**20)
    promised = re.search(r"or ([\d.]+) MiB per device|with: ([\d.]+) MiB per device", str(refused.value))
    assert promised is not None
    rank_plans(model, hardware(), WORLD, batch, budget=round(float(promised[1] or promised[2]) * 2**20))


def test_a_profile_without_the_rate_of_a_type_is_named():
    rates = replace(hardware().device, flops_per_second={"bfloat16": 1e13})
    with pytest.raises(UsageError, match="flops_per_second holds no float32; it holds bfloat16"):
        rates.rate("float32")


@pytest.mark.slow
def test_what_the_lower_bound_prunes_is_no_plan_of_the_answer(monkeypatch):
    model = gpt(hidden=2048, layers=8, heads=16, sequence=1024, vocabulary=8192, name="of some size")
    cluster, world = cluster_called("8x3090")
    pruned = []
    exact = SettingSearch._least_fitting

    def noted(search, states):
        pruned.append(exact(search, states))
        return pruned[-1]

    monkeypatch.setattr(SettingSearch, "_least_fitting", noted)
    space = Space(micro_batches=(4, 8))
    found = rank_plans(model, cluster, world, 16, budget=7 * GIB, space=space)
    assert max(pruned) > 1.1 * seconds_of(found[0])
    monkeypatch.setattr(SettingSearch, "_least_fitting", lambda search, states: 0.0)
    assert rank_plans(model, cluster, world, 16, budget=7 * GIB, space=space) == found


@pytest.mark.long
def test_a_device_that_its_runtime_fills():
    link = LinkModel(1e-4, 1e8)
    hardware = Hardware("small", Device("small", 1 << 30, {"float32": 1e10}, 1e10), 2, link, link)
    with pytest.raises(
        UsageError, match=r"'small': a device of 1\.0 GiB has no memory beside the runtime's 1\.0 GiB"
    ):
        plan(gpt(32, 2, 4, 16, vocabulary=256), (hardware, 2), global_batch=8)


def test_pipelines_that_are_too_long_to_be_listed_are_not_planned():
    space = Space(micro_batches=(4096,), pipelines=("one_f_one_b",), degrees=(1,))
    hardware, world = cluster_called("32x3090")
    stages = {each.stages for each in settings(MODELS["gpt-2.7b"], hardware, world, 32 * 4096, space)}
    assert stages == {1, 2, 4, 8, 16}, "32 stages of 4096 micro-batches are more than any list has"
