"""The walk from vertex to vertex against HiGHS; what it keeps when weights and columns change; its budget."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy.optimize import linprog

from oases import _svm
from oases_svm.vertex import Budget, Vertex


@pytest.mark.parametrize("seed", range(40))
def test_a_vertex_is_the_optimum_of_the_linear_program(seed):
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(2, 120)), int(rng.integers(1, 60))
    x = [rng.standard_normal((n, m)), rng.integers(-1, 2, (n, m)).astype(float), 1.0 * (rng.random((n, m)) < 0.2)][
        seed % 3
    ]
    y = np.where(x[:, :3].sum(1) + rng.standard_normal(n) > 0, 1.0, -1.0)
    y[0], y[-1] = 1, -1
    c = rng.random(n) if seed % 2 else np.ones(n)
    c /= c.sum()
    free = seed % 5 != 0
    h = x * y[:, None]
    h = np.asfortranarray(np.column_stack([y, h]) if free else h)
    tau = np.full(h.shape[1], rng.choice([0, 0.001, 0.01, 0.1])) * rng.uniform(0, 1, h.shape[1])
    tau[: int(free)] = 0
    vertex, budget = Vertex(h, c, free), Budget(10_000)
    assert vertex.minimise(tau, budget)
    w, multipliers = vertex.solution()
    value = c @ np.maximum(0, 1 - h @ w) + tau @ np.abs(w)
    reference = linprog(
        np.concatenate([tau, tau, c]), A_ub=-np.column_stack([h, -h, np.eye(n)]), b_ub=-np.ones(n), bounds=(0, None)
    )
    assert value == pytest.approx(reference.fun, rel=1e-8, abs=1e-8)
    assert np.all(np.abs(h.T @ multipliers) <= tau + 1e-8)


def drawn_columns(n, m, seed=0):
    rng = np.random.default_rng(seed)
    return np.asfortranarray(rng.standard_normal((n, m))), np.full(n, 1 / n)


def value(h, c, tau, w):
    return c @ np.maximum(0, 1 - h @ w) + tau @ np.abs(w)


def test_it_goes_on_where_weights_change_and_columns_are_added():
    h, c = drawn_columns(90, 70)
    vertex, budget = Vertex(h[:, :5].copy(order="F"), c, False), Budget(100_000)
    for m, weight in [(5, 0.1), (20, 0.05), (70, 0.02), (70, 0.001), (70, 0.05)]:
        vertex.add(np.asfortranarray(h[:, vertex.h.shape[1] : m]))
        tau = np.full(m, weight)
        assert vertex.minimise(tau, budget)
        w, _ = vertex.solution()
        anew = Vertex(np.asfortranarray(h[:, :m]), c, False)
        assert anew.minimise(tau, budget)
        assert value(h[:, :m], c, tau, w) == pytest.approx(value(h[:, :m], c, tau, anew.solution()[0]), rel=1e-9)
        assert np.array_equal(vertex.h, h[:, :m])


def test_many_pivots_stay_exact():
    h, c = drawn_columns(600, 300)
    vertex, budget = Vertex(h, c, False), Budget(100_000)
    tau = np.full(300, 1e-4)
    assert vertex.minimise(tau, budget)
    assert budget.used > 300  # the inverse was computed anew on the way
    _, multipliers = vertex.solution()
    assert np.abs(h.T @ multipliers).max() <= 1e-4 * (1 + 1e-9)


def test_steps_and_work_end_a_walk_which_goes_on():
    h, c = drawn_columns(80, 40)
    tau = np.full(40, 1e-3)
    vertex, budget = Vertex(h, c, False), Budget(7)
    assert not vertex.minimise(tau, budget)
    assert budget.used == 7
    budget.limit = 10_000
    with budget.within(0.0):
        assert not vertex.minimise(tau, budget)
        assert budget.used <= 8  # none is begun after the work allowed
    assert not vertex.minimise(tau, budget, pivots=3)
    assert vertex.minimise(tau, budget)
    assert budget.work > 0


def test_a_walk_refuses_what_does_not_fit():
    h, c = drawn_columns(10, 3)
    with pytest.raises(ValueError, match="weights has 9 numbers, not 10"):
        _svm.Walk(h, c[:9], np.ones(10))
    walk = _svm.Walk(h, c, np.ones(10))
    with pytest.raises(ValueError, match="tau has 4 numbers, not 3"):
        walk.minimise(np.ones(4), 1, np.inf)
    with pytest.raises(ValueError, match="a column has 9 numbers, not 10"):
        walk.add(np.zeros((9, 2)))


def test_columns_outlive_their_walk():
    h, c = drawn_columns(10, 3)
    view = Vertex(h, c, False).h
    assert np.array_equal(view, h)
