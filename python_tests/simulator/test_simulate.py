"""Schedules under a cost model against closed forms."""

import itertools
import random
from dataclasses import replace

import pytest

from oases.core.schedule import generate, generate_pipeline
from oases.plans.expert_schedules import exchanging
from oases.simulator import simulate
from oases.simulator.cost import BlockTimes, StackCosts
from oases.simulator.program import Contention

NAMES = ("F", "C", "R", "B", "W", "all_reduce")
BLOCKS = 6


def drawn(rng):
    return {name: rng.uniform(0.01, 1.0) for name in NAMES}


def test_a_synchronous_step_is_the_sum_of_its_ops():
    costs = {"F": 3.0, "C": 0.5, "B": 4.0, "W": 2.0, "all_reduce": 1.5}
    timeline = simulate(generate("sync", BLOCKS, 1), costs)
    # B computes the weight gradients that no W computes.
    assert timeline.total_seconds == pytest.approx(BLOCKS * (3 + 0.5 + 4 + 2 + 2 * 1.5))
    assert timeline.exposed(0) == pytest.approx(BLOCKS * 2 * 1.5)
    again = simulate(generate("sync", BLOCKS, 1, "full"), costs | {"R": 2.5})
    assert again.total_seconds == pytest.approx(BLOCKS * (3 + 2.5 + 2 * 0.5 + 4 + 2 + 3 * 1.5))


def halves(schedule, costs):
    """Sub-batches of half the size take half the time of each op."""
    return {name: seconds / schedule.num_sub_batches for name, seconds in costs.items()}


@pytest.mark.parametrize(("recompute", "sub_batches"), list(itertools.product(("none", 2, "full"), (2, 3, 4))))
def test_oases_is_never_slower_than_sync(recompute, sub_batches):
    """For any costs that halve with the samples and do not contend, as then it only moves waits."""
    rng = random.Random(sub_batches)
    sync = generate("sync", BLOCKS, 1, recompute)
    oases = generate("oases", BLOCKS, sub_batches, recompute)
    for _ in range(40):
        costs = drawn(rng)
        fast, slow = simulate(oases, halves(oases, costs)), simulate(sync, costs)
        assert fast.total_seconds <= slow.total_seconds * (1 + 1e-12)
        needed = sum(costs[name] for name in ("F", "C", "B", "W")) + (recompute == "full") * costs["R"]
        assert fast.total_seconds >= BLOCKS * max(needed, 2 * costs["all_reduce"]) * (1 - 1e-12)


def test_oases_may_be_slower_where_contention_is_heavy_or_sub_batches_cost_extra():
    """Where compute and link slow each other more than overlap saves, and where half a batch takes over half."""
    sync, oases = generate("sync", BLOCKS, 1), generate("oases", BLOCKS, 2)
    times = BlockTimes(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    whole = StackCosts((times,) * BLOCKS, {"all_reduce": 1.0}, contention=Contention(3.0, 3.0))
    half = StackCosts((times.scaled(0.5),) * BLOCKS, {"all_reduce": 0.5}, contention=Contention(3.0, 3.0))
    assert simulate(oases, half).total_seconds > simulate(sync, whole).total_seconds
    costs = {"F": 1.0, "B": 1.0, "W": 1.0, "all_reduce": 0.01}
    dear = {name: 0.9 * seconds for name, seconds in costs.items()}
    assert simulate(oases, dear).total_seconds > simulate(sync, costs).total_seconds


@pytest.mark.parametrize("name", ["sync", "fine_grained", "cross_pass", "oases", "sub_pipelined"])
@pytest.mark.parametrize("sub_batches", [2, 4])
def test_without_communication_a_step_is_its_compute(name, sub_batches):
    schedule = generate(name, BLOCKS, sub_batches)
    costs = {"F": 2.0, "C": 1.0, "B": 3.0, "W": 1.5}
    timeline = simulate(schedule, halves(schedule, costs))
    assert timeline.total_seconds == pytest.approx(BLOCKS * 7.5)
    assert timeline.exposed(0) == 0


def test_a_link_that_nothing_can_hide_is_busy_all_the_time():
    schedule = generate("oases", BLOCKS, 2)
    timeline = simulate(schedule, {"F": 0.1, "B": 0.1, "W": 0.1, "all_reduce": 1.0})
    # All sums one after another, but for the first op of each pass and the ends of both.
    assert 2 * BLOCKS * 2 <= timeline.total_seconds <= 2 * BLOCKS * 2 + 1
    assert timeline.busy(0, "link") == pytest.approx(2 * BLOCKS * 2)


@pytest.mark.parametrize(("stages", "micro_batches"), list(itertools.product((1, 2, 4, 5), (1, 2, 4, 9))))
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_a_pipeline_takes_as_long_as_its_formula(name, stages, micro_batches):
    costs = {"F": 1.0, "R": 0.75, "B": 2.0}
    timeline = simulate(generate_pipeline(name, stages, micro_batches), costs)
    assert timeline.total_seconds == pytest.approx((micro_batches + stages - 1) * 3.75)
    assert all(timeline.bubble(stage) == pytest.approx((stages - 1) * 3.75) for stage in range(stages))
    without = simulate(generate_pipeline(name, stages, micro_batches, recompute=False), costs)
    assert without.total_seconds == pytest.approx((micro_batches + stages - 1) * 3.0)


def test_parts_on_the_way_back_send_the_other_way():
    """A stage's first part sends activations to the next stage, its second part to the stage before."""
    timeline = simulate(generate_pipeline("zb_v", 3, 5, recompute=False), {"F": 1.0, "B": 1.0, "W": 1.0, "send": 0.1})
    found = {(span.name.rpartition(".")[0], span.rank, span.lane) for span in timeline.spans if "send" in span.name}
    on, back = "to the next stage", "to the stage before"
    assert found == {
        *(("send F 0", 0, on), ("send F 1", 1, on), ("send F 3", 2, back), ("send F 4", 1, back)),
        *(("send B 5", 0, on), ("send B 4", 1, on), ("send B 2", 2, back), ("send B 1", 1, back)),
    }


def test_messages_lengthen_the_way_through_the_pipeline():
    timeline = simulate(generate_pipeline("gpipe", 3, 1, recompute=False), {"F": 1.0, "B": 2.0, "send": 0.5})
    assert timeline.total_seconds == pytest.approx(3 * 3 + 4 * 0.5)


def test_all_to_alls_of_another_link_do_not_queue_behind_sums():
    schedule = exchanging(generate("oases", 2, 2), (1,))
    times = BlockTimes(1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0)
    one = StackCosts((times, times), {"all_reduce": 2.0}, link="node", exchanges=(0.0, 2.0))
    slow = Contention(link=1.5)
    shared, apart = (
        simulate(schedule, costs) for costs in (one, replace(one, exchange_link=("cluster", Contention())))
    )
    lanes = {(span.lane, "all_to_all" in span.name) for span in apart.spans if span.lane != "compute"}
    assert lanes == {("node", False), ("cluster", True)}
    assert {lane for _, lane in shared.lanes} == {"compute", "node"}
    assert apart.total_seconds < shared.total_seconds
    slowed = simulate(schedule, replace(one, exchange_link=("cluster", slow)))
    assert slowed.total_seconds > apart.total_seconds


@pytest.mark.parametrize("sub_batches", [1, 2])
def test_a_recomputed_block_sends_its_tokens_again(sub_batches):
    """Two all-to-alls forward, two backward, and two where the forward pass runs again: waited for inside."""
    for recompute, sent in (("none", 4), ("full", 6)):
        schedule = exchanging(generate("oases", 4, sub_batches, recompute), (1, 3))
        nothing = BlockTimes(*[0.0] * 8)
        costs = StackCosts((nothing,) * 4, {}, exchanges=(0.0, 1.0, 0.0, 1.0))
        assert bool(schedule.dispatched) == (recompute == "none")
        assert simulate(schedule, costs).total_seconds == pytest.approx(2 * sent * sub_batches)


def test_all_to_alls_inside_of_a_layer_queue_on_the_link():
    """In turns with sums that are under way, which a recomputed layer of another sub-batch waits for."""
    schedule = generate("oases", 2, 2, "full")
    nothing = BlockTimes(*[0.0] * 8)
    costs = StackCosts((nothing,) * 2, {"all_reduce": 3.0}, exchanges=(0.0, 1.0))
    timeline = simulate(schedule, costs)
    sums = sum(op.kind == "all_reduce" for op in schedule)
    assert timeline.total_seconds == pytest.approx(3 * sums + 2 * 6)
    assert timeline.exposed(0) == pytest.approx(timeline.total_seconds)
    sent = [span for span in timeline.spans if span.kind == "all-to-all"]
    assert len(sent) == 3 * 2
    assert {span.seconds for span in sent} == {2.0}
