"""Chains of blocks: solved as the best of all choices of small chains, and as HiGHS solves larger ones."""

import itertools

import numpy as np
import pytest

from oases.errors import UsageError
from oases.planner.chain import Chain, InfeasibleError, relaxed_cost, solve


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
    capacity = np.inf if seed % 10 == 0 else low + rng.random() * (high - low) * 0.7
    return Chain(tuple(tuple(range(count)) for count in counts), costs, weights, tuple(edges), capacity)


def choices(chain: Chain):
    """Cost and weight of every choice that no edge forbids."""
    for places in itertools.product(*map(range, map(len, chain.states))):
        if np.isfinite(cost := chain.cost_of(places)):
            yield cost, chain.weight_of(places)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 600, 100)])
def test_random_chains_against_every_choice(seeds):
    for chain in map(random_chain, seeds):
        found = list(choices(chain))
        fitting = [cost for cost, weight in found if weight <= chain.capacity]
        if not fitting:
            with pytest.raises(InfeasibleError) as caught:
                solve(chain)
            assert caught.value.smallest_weight == pytest.approx(min((w for _, w in found), default=np.inf))
            continue
        solution = solve(chain)
        assert solution.cost == pytest.approx(min(fitting), rel=1e-6, abs=1e-9)
        assert solution.cost == chain.cost_of(solution.places)
        assert chain.weight_of(solution.places) <= chain.capacity
        assert solution.states == tuple(s[p] for s, p in zip(chain.states, solution.places, strict=True))
        assert solution.binds == (solution.cost > min(cost for cost, _ in found) + 1e-9)


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


def by_highs(chain: Chain) -> float:
    """Cost by the integer program as a flow: a one-hot variable per node and state, and one per edge."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    sizes = [len(states) for states in chain.states]
    nodes, edges = sum(sizes), [np.arange(a * b).reshape(a, b) for a, b in itertools.pairwise(sizes)]
    total, first = nodes + sum(each.size for each in edges), nodes
    offsets, rows = np.cumsum([0, *sizes]), []
    for i, each in enumerate(edges):
        for node, sums in ((i, each), (i + 1, each.T)):
            for state, used in enumerate(sums):
                row = np.zeros(total)
                row[offsets[node] + state], row[first + used] = 1, -1
                rows.append(row)
        first += each.size
    one, weigh = np.zeros((2, total))
    one[: sizes[0]], weigh[:nodes] = 1, np.concatenate(chain.weights) / chain.capacity
    held = [*[0] * len(rows), 1]
    found = milp(
        np.concatenate([*chain.costs, *(each.ravel() for each in chain.edges)]), integrality=np.ones(total),
        bounds=Bounds(0, 1), options={"mip_rel_gap": 1e-7},
        constraints=LinearConstraint(np.array([*rows, one, weigh]), [*held, 0], [*held, 1]),
    )  # fmt: skip
    return float(found.fun)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_transformer_is_solved_as_by_highs(share):
    chain = transformer(6, share)
    solution = solve(chain)
    assert solution.cost == pytest.approx(by_highs(chain), rel=1e-6)
    assert solution.binds


def test_a_change_that_costs_much_is_made_once():
    solution = solve(transformer(24, 0.5))
    assert sum(a != b for a, b in itertools.pairwise(solution.states)) == 1


def test_a_cheaper_edge_keeps_a_state_that_costs_more():
    chain = Chain.made(
        [("a", "b")] * 2, lambda i, s: float(s == "b"), lambda i, s: 1, lambda i, s, t: 2.0 * (s == "a")
    )
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
