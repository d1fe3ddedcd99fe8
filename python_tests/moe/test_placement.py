"""Placements of experts: the performance model against plain arithmetic, the search against the optimum."""

import itertools
from random import Random

import numpy as np
import pytest

from benchmarks.placements import bound
from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.placement import make_placement, plan
from oases_bench.loads import generate

FAST = Costs(token_seconds=2e-6, token_bytes=4096, expert_bytes=8 << 20, bandwidth=12.5e9, non_expert_seconds=1e-3)
SLOW = Costs(token_seconds=4e-6, token_bytes=2048, expert_bytes=4 << 20, bandwidth=125e6, non_expert_seconds=5e-3)
METHODS = ("none", "prophet", "faster_moe", "eplb")


def most_copies(placed):
    """Copies on the device that has most."""
    held = [device for devices in placed.copies for device in devices]
    return int(np.bincount(held, minlength=1).max())


def counts_of(experts, devices, seed, concentration=0.3, tokens=512):
    (found,) = generate(experts=experts, devices=devices, tokens=tokens, seed=seed, concentration=concentration)
    return found


def moving_by_hand(counts, placement, costs):
    """Seconds of the experts' way: a share to each holder, then each share to all others; or the paper's mean."""
    experts, devices = counts.shape
    if costs.transfer == "mean":
        return costs.expert_bytes * sum(map(len, placement.copies)) / devices / costs.bandwidth, 0.0
    out, into, exchanged = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    nodes = devices // costs.devices_per_node if costs.devices_per_node else 1
    node = [device * nodes // devices for device in range(devices)]
    crossing = np.zeros((2, nodes))
    for expert in range(experts):
        home = expert * devices // experts
        held = placement.copies[expert]
        assert home not in held
        assert len(set(held)) == len(held)
        for device in held:
            out[home] += 1 / len(held)
            into[device] += 1 / len(held)
            exchanged[device] += (len(held) - 1) / len(held)
            if node[device] != node[home]:
                crossing[0, node[home]] += 1 / len(held)
                crossing[1, node[device]] += 1 / len(held)
            for other in held:
                if node[other] != node[device]:
                    crossing[0, node[device]] += 1 / len(held)
                    crossing[1, node[other]] += 1 / len(held)
    both = costs.both_ways or 2 * costs.bandwidth
    first = max(max(out.max(), into.max()) / costs.bandwidth, (out + into).max() / both)
    rounds = np.array([first, exchanged.max() * max(1 / costs.bandwidth, 2 / both)])
    if not any(map(len, placement.copies)):
        return 0.0, 0.0
    rounds *= max(1, crossing.max() / costs.node_bandwidth / rounds.sum())
    return tuple(costs.expert_bytes * rounds + costs.latency)


def seconds_by_hand(counts, placement, costs):
    """Equations (6) and (8) written out, with loops."""
    experts, devices = counts.shape
    tokens, sent, received = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    nodes = devices // costs.devices_per_node if costs.devices_per_node else 1
    node = [device * nodes // devices for device in range(devices)]
    crossing = np.zeros((2, nodes))
    for expert in range(experts):
        home = expert * devices // experts
        for device in range(devices):
            to, number = placement.routes[expert, device], counts[expert, device]
            assert to == home or to in placement.copies[expert]
            tokens[to] += number
            if to != device:
                sent[device] += number
                received[to] += number
            if node[to] != node[device]:
                crossing[0, node[device]] += number
                crossing[1, node[to]] += number
    assert tokens.tolist() == placement.device_loads.tolist()
    first, second = moving_by_hand(counts, placement, costs)
    moving = first + second
    a2a = costs.latency + costs.token_bytes * max(
        max(sent.max(), received.max()) / costs.bandwidth,
        (sent + received).max() / (costs.both_ways or 2 * costs.bandwidth),
        crossing.max() / costs.node_bandwidth,
    )
    forward = costs.token_seconds * tokens.max()

    def home(expert):
        return expert * devices // experts

    total = costs.fixed_seconds + 4 * a2a + (1 + costs.backward) * forward
    if costs.transfer != "mean":
        given = [
            sum(home(e) == device and bool(placement.copies[e]) for e in range(experts)) for device in range(devices)
        ]
        held = [sum(device in placement.copies[e] for e in range(experts)) for device in range(devices)]
        total += costs.handling_seconds * max(np.add(given, held))
    if not costs.scheduled:
        return total + 2 * moving
    if costs.transfer == "mean":
        under = forward + costs.non_expert_seconds
        return total + max(0, moving - under) + max(0, moving - costs.backward * under)
    if costs.leading:
        others = costs.non_expert_seconds
        return total + max(0, first - others) + second + max(0, second - costs.backward * others) + first
    left = [max(0, first - hides * costs.non_expert_seconds) for hides in (1, costs.backward)]
    return total + sum(left) + sum(max(0, second - hides * forward) for hides in (1, costs.backward))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [{}, {"scheduled": False}, {"transfer": "mean"}, {"latency": 1e-3},
     {"handling_seconds": 1e-4, "fixed_seconds": 2e-3}, {"handling_seconds": 1e-4, "scheduled": False},
        {"both_ways": 1.5e8}, {"both_ways": 1.5e8, "scheduled": False},
        {"leading": True}, {"leading": True, "latency": 1e-3},
     {"devices_per_node": 4, "node_bandwidth": 5e7}, {"backward": 1.5, "scheduled": False, "latency": 1e-4}],
)  # fmt: skip
def test_seconds_are_those_of_the_equations(method, options):
    for base in (FAST, SLOW):
        costs = Costs(**{**vars(base), **options})
        for seed in range(4):
            counts = counts_of(16, 8, seed)
            placement = plan(counts, costs, method=method)
            assert placement.predicted_seconds == pytest.approx(seconds_by_hand(counts, placement, costs), rel=1e-9)
            assert placement.device_loads.sum() == counts.sum()


@pytest.mark.few(2, 4)
@pytest.mark.parametrize("devices", [8, 16, 32, 64])
def test_never_above_the_others_at_an_equal_budget(devices):
    for seed in range(25):
        for costs in (FAST, SLOW):
            budget = costs.expert_bytes * (2, 4, 8, devices)[seed % 4]
            counts = counts_of(devices, devices, seed, (0.05, 0.2, 0.5, 2.0, 10.0)[seed % 5])
            found = {method: plan(counts, costs, method=method, memory_budget=budget) for method in METHODS}
            for method in METHODS:
                assert found["prophet"].predicted_seconds <= found[method].predicted_seconds * (1 + 1e-9), method
                assert most_copies(found[method]) * costs.expert_bytes <= budget


def drawn_costs(random):
    """Costs of any cluster, from slow links to fast ones."""
    bandwidth = 10 ** random.uniform(7, 10)
    return Costs(
        token_seconds=10 ** random.uniform(-7, -4),
        token_bytes=random.choice([512, 8192]),
        expert_bytes=10 ** random.uniform(4, 8),
        bandwidth=bandwidth,
        latency=random.choice([0, 1e-4, 1e-3]),
        non_expert_seconds=random.choice([0, 1e-3, 0.02]),
        scheduled=random.random() < 0.5,
        leading=random.random() < 0.5,
        handling_seconds=random.choice([0, 1e-4]),
        both_ways=random.choice([0, bandwidth * random.uniform(1, 2)]),
        transfer=random.choice(["rounds", "mean"]),
    )


@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("draws", [30, pytest.param(150, marks=pytest.mark.long)])
def test_few_devices_choose_the_best_of_all_methods(devices, draws):
    """Between two devices a copy for one is a copy for all, so that shadowing is hard to beat there."""
    random = Random(devices)
    for seed in range(draws):
        costs, experts = drawn_costs(random), devices * random.randint(1, 6)
        tokens, concentration = random.choice([0, 7, 64, 4096]), random.choice([0.05, 0.3, 1.0, 10.0])
        counts = counts_of(experts, devices, seed, concentration, tokens=tokens)
        budget = random.choice([None, 0.0, costs.expert_bytes, 2 * costs.expert_bytes])
        found = {m: plan(counts, costs, method=m, memory_budget=budget).predicted_seconds for m in METHODS}
        assert found["prophet"] <= min(found.values()) * (1 + 1e-9), (seed, costs, budget, found)


@pytest.mark.few(2, 6)
@pytest.mark.parametrize("costs", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("seed", range(3))
def test_near_the_optimum(costs, seed):
    counts = counts_of(4, 4, seed, 0.3, tokens=1024)
    best = bound(counts, costs, 4, seconds=60.0, whole=True)
    assert best.solved
    found = plan(counts, costs).predicted_seconds
    assert (1 - 2e-3) * best.seconds <= found <= 1.03 * best.seconds


@pytest.mark.long
def test_every_placement_of_a_small_case_is_at_least_the_optimum():
    counts = counts_of(3, 3, 2, 0.2, tokens=300)
    least = min(
        make_placement("", counts, FAST, (np.array(routes).reshape(3, 3), copies)).predicted_seconds
        for copies in itertools.product(*([[], [a], [b], [a, b]] for a, b in ((1, 2), (0, 2), (0, 1))))
        for routes in itertools.product(*([e, *copies[e]] for e in range(3) for _ in range(3)))
    )
    lowest = bound(counts, FAST, 3, seconds=30.0)
    assert lowest.solved
    assert lowest.seconds <= least * (1 + 1e-6)
    assert bound(counts, FAST, 3, seconds=30.0, whole=True).seconds == pytest.approx(least, rel=2e-3)


def test_nothing_below_the_bound_is_said_so():
    even = np.full((4, 4), 100)
    none = plan(even, SLOW, method="none").predicted_seconds
    lowest = bound(even, SLOW, 4, seconds=30.0, below=none)
    assert lowest.solved
    assert lowest.seconds == pytest.approx(none, rel=2e-3)
    with pytest.raises(UsageError, match="devices of one node"):
        bound(even, Costs(**{**vars(SLOW), "devices_per_node": 2}), 4, seconds=1.0)


def test_every_rank_finds_the_same_and_slots_are_kept():
    for seed in range(6):
        counts = counts_of(32, 8, seed, 0.2)
        first, second = (plan(counts, FAST, memory_budget=3 * FAST.expert_bytes) for _ in range(2))
        assert first.copies == second.copies
        assert np.array_equal(first.routes, second.routes)
        assert most_copies(first) <= 3


def test_tokens_stay_in_their_node_where_its_border_is_slow():
    counts = np.zeros((8, 8), dtype=int)
    counts[0] = 1000
    near = Costs(**{**vars(FAST), "devices_per_node": 4, "node_bandwidth": 1e9})
    found = plan(counts, near)
    crossing = sum(counts[e, d] for e in range(8) for d in range(8) if found.routes[e, d] // 4 != d // 4)
    assert crossing < counts[0, 4:].sum() / 4
    assert found.predicted_seconds < plan(counts, near, method="none").predicted_seconds / 2


def test_even_loads_are_left_alone():
    even = np.full((16, 8), 100)
    for method in ("prophet", "faster_moe"):
        assert plan(even, SLOW, method=method).moved == ()


def test_all_tokens_to_one_expert_and_no_tokens_at_all():
    counts = np.zeros((8, 8), dtype=int)
    counts[3] = 1000
    found = plan(counts, FAST)
    assert found.device_loads.max() < 3 * counts.sum() / 8
    nothing = plan(np.zeros((8, 8), dtype=int), FAST)
    assert nothing.moved == ()
    assert nothing.device_loads.tolist() == [0] * 8


def test_a_budget_for_less_than_a_copy_places_none():
    counts = counts_of(8, 8, 0, 0.05)
    for method in METHODS:
        assert plan(counts, FAST, method=method, memory_budget=FAST.expert_bytes - 1).moved == ()


@pytest.mark.parametrize("method", METHODS)
def test_one_device_and_one_expert_each(method):
    assert plan([[5], [7]], FAST, method=method).device_loads.tolist() == [12]
    assert plan([[5, 1], [7, 2]], FAST, method=method).device_loads.sum() == 15


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([[1, -1], [0, 0]], r"counts\[0, 1\] is -1"),
        ([[1.5, 1], [0, 0]], r"counts\[0, 0\] is 1.5"),
        ([[float("nan"), 1], [0, 0]], r"counts\[0, 0\] is nan"),
        ([[float("inf"), 1], [0, 0]], r"counts\[0, 0\] is inf"),
        ([[1, 1, 1], [1, 1, 1]], "2 experts do not divide over 3 devices"),
        ([[1, 1]] * 3, "3 experts do not divide over 2 devices"),
        ([1, 2], r"a shape of \[2\]"),
        ([["a"]], "must be whole numbers"),
    ],
)
def test_bad_counts(counts, said):
    with pytest.raises(UsageError, match=said):
        plan(counts, FAST)


def test_bad_options():
    with pytest.raises(UsageError, match="unknown placement 'best'; known are none, prophet"):
        plan([[1, 1], [1, 1]], FAST, method="best")
    with pytest.raises(UsageError, match="memory_budget must be at least 0 bytes, got -1"):
        plan([[1, 1], [1, 1]], FAST, memory_budget=-1)
    with pytest.raises(UsageError, match="bandwidth must be above 0"):
        Costs(token_seconds=1, token_bytes=1, expert_bytes=1, bandwidth=0)
    with pytest.raises(UsageError, match="8 devices do not divide into nodes of 3"):
        plan(counts_of(8, 8, 0), Costs(**{**vars(FAST), "devices_per_node": 3}))


@pytest.mark.parametrize(
    ("routes", "copies", "said"),
    [
        ([[0, 0]], [[0], [1]], "give a row of each for every expert"),
        ([[0, 0], [1, 1]], [[0]], "with copies of 1 experts"),
        ([[0, 9], [1, 1]], [[0], [1]], "device 9 of an expert is not among 2"),
        ([[0, 0], [1, 1]], [[0, 99], [1]], "device 99 of an expert is not among 2"),
        ([[0, -1], [1, 1]], [[0], [1]], "device -1 of an expert"),
    ],
)
def test_placements_of_devices_that_are_not_there(routes, copies, said):
    with pytest.raises(ValueError, match=said):
        make_placement("", np.array([[3, 1], [2, 2]]), FAST, (np.array(routes), copies))
