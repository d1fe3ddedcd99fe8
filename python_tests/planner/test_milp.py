"""Plans as MILP: against every choice of small chains, and solving methods against each other."""

import itertools

import numpy as np
import pytest

from oases.errors import UsageError
from oases.planner.block_chain import Chain, DenseChain
from oases.planner.milp import InfeasibleError, relaxed_cost, solve


def random_chain(seed: int) -> Chain:
    """Up to six nodes of up to four states, one edge in five forbidden; odd seeds give whole numbers, and so ties."""
    rng = np.random.default_rng(seed)

    def numbers(*shape: int):
        return rng.integers(0, 10, shape).astype(float) if seed % 2 else rng.random(shape)

    counts = [int(count) for count in rng.integers(1, 5, rng.integers(1, 7))]
    costs, weights = tuple(map(numbers, counts)), tuple(map(numbers, counts))
    edges = []
    for pair in itertools.pairwise(counts):
        edge = numbers(*pair)
        edge[rng.random(pair) < 0.2] = np.inf
        edges.append(edge)
    low, high = (sum(map(extreme, weights)) for extreme in (np.min, np.max))
    capacity = None if seed % 10 == 0 else low + rng.random() * (high - low) * 0.7
    return Chain(tuple(tuple(range(count)) for count in counts), costs, weights, tuple(edges), capacity)


def choices(chain: Chain):
    """Cost and weight of every choice that no edge forbids."""
    for places in itertools.product(*map(range, map(len, chain.states))):
        if np.isfinite(cost := chain.cost_of(places)):
            yield cost, chain.weight_of(places)


def check(chain: Chain, **how) -> str:
    """Compare with all choices; returns what closed the gap."""
    found = list(choices(chain))
    limit = np.inf if chain.capacity is None else chain.capacity
    fitting = [cost for cost, weight in found if weight <= limit]
    if not fitting:
        with pytest.raises(InfeasibleError) as caught:
            solve(chain, **how)
        assert caught.value.smallest_weight == pytest.approx(min((w for _, w in found), default=np.inf))
        return "infeasible"
    solution = solve(chain, **how)
    assert solution.cost == pytest.approx(min(fitting), rel=1e-6, abs=1e-9)
    assert solution.bound <= min(fitting) + 1e-9
    assert solution.gap <= 1e-6
    assert solution.cost == chain.cost_of(solution.places)
    assert solution.weight == chain.weight_of(solution.places) <= limit
    assert solution.states == tuple(s[p] for s, p in zip(chain.states, solution.places, strict=True))
    assert solution.binds == (solution.cost > min(cost for cost, _ in found) + 1e-9)
    return solution.method


@pytest.mark.long
def test_random_chains_against_every_choice():
    methods = {check(random_chain(seed)) for seed in range(600)}
    assert methods == {"infeasible", "shortest path", "dual bound", "labels"}


@pytest.mark.long
def test_random_chains_by_the_flow_program():
    assert "milp" in {check(random_chain(seed), max_labels=0) for seed in range(200)}


DEGREES = (2, 4, 8)


def transformer(layers: int, share: float, edge: float = 0.01) -> Chain:
    """Layers all alike; of three degrees the fastest is the heaviest. share: of the way from lightest to heaviest."""

    def weight(block: int, tp: int) -> float:
        return (8 if block % 2 else 4) * 1e8 / tp + 1e7 * tp

    low, high = (sum(extreme(weight(b, t) for t in DEGREES) for b in range(2 * layers)) for extreme in (min, max))
    return Chain.made(
        [DEGREES] * (2 * layers),
        node_cost=lambda block, tp: (0.01 if block % 2 else 0.007) * (1 + 0.1 * tp),
        weight=weight,
        edge_cost=lambda block, a, b: 0.0 if a == b else edge,
        capacity=low + share * (high - low),
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_labels_and_flow_agree_on_a_transformer(share):
    by_labels, by_flow = (solve(transformer(6, share), max_labels=most) for most in (10_000, 0))
    assert by_labels.cost == pytest.approx(by_flow.cost, rel=1e-6)
    assert by_labels.binds


def test_a_change_that_costs_much_is_made_once():
    solution = solve(transformer(24, 0.5))
    assert sum(a != b for a, b in itertools.pairwise(solution.states)) == 1


def test_a_state_that_another_replaces_is_left_out():
    costs = {"a": 2.0, "b": 1.0, "c": 1.0}
    chain = Chain.made([("a", "b", "c")] * 2, lambda i, s: costs[s], lambda i, s: 1, lambda *_: 0)
    assert np.isfinite(DenseChain.of(chain).costs).tolist() == [[False, True, False]] * 2


def test_a_cheaper_edge_keeps_a_state_that_costs_more():
    chain = Chain.made(
        [("a", "b")] * 2, lambda i, s: float(s == "b"), lambda i, s: 1, lambda i, s, t: 2.0 * (s == "a")
    )
    assert np.isfinite(DenseChain.of(chain).costs).tolist() == [[True, True], [True, False]]
    assert solve(chain).states == ("b", "a")


def test_too_little_memory_is_named():
    with pytest.raises(InfeasibleError, match="lightest choice of states weighs"):
        solve(transformer(2, -0.1))


def test_no_path_is_named():
    chain = Chain.made([(1, 2)] * 2, lambda *_: 1.0, lambda *_: 1, lambda *_: np.inf)
    with pytest.raises(InfeasibleError, match="no path") as caught:
        solve(chain)
    assert caught.value.smallest_weight == np.inf


@pytest.mark.parametrize(
    ("costs", "edges", "message"),
    [
        ((np.zeros(2), np.zeros(1)), (np.zeros((2, 2)),), "costs must hold one number"),
        ((np.zeros(2), np.zeros(2)), (np.zeros((2, 1)),), "edges must be matrices"),
        ((np.zeros(2), np.full(2, np.nan)), (np.zeros((2, 2)),), "nan"),
    ],
)
def test_shapes_and_numbers_are_checked(costs, edges, message):
    with pytest.raises(UsageError, match=message):
        Chain(((1, 2), (1, 2)), costs, (np.zeros(2), np.zeros(2)), edges)


def test_the_relaxed_cost_is_a_lower_bound():
    """Take chains of equal nodes without edges; the bound is reached where nodes can be divided as the mixture is."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs, weights = rng.random((2, 4))
        capacity = float(rng.uniform(0.5 * weights.min(), weights.max()))
        bound = relaxed_cost(costs, weights, capacity)
        chain = Chain(((0, 1, 2, 3),) * 4, (costs,) * 4, (weights,) * 4, (np.zeros((4, 4)),) * 3, 4 * capacity)
        if capacity < weights.min():
            assert bound == np.inf
        else:
            assert bound <= solve(chain).cost / 4 + 1e-9
    assert relaxed_cost(np.array([4.0, 2.0]), np.array([0.0, 8.0]), 2.0) == 3.5
    assert relaxed_cost(np.array([4.0, 2.0]), np.array([0.0, 8.0]), 9.0) == 2.0
