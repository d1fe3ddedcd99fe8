"""Penalties: proximal maps against brute force, slopes against differences, the weak-convexity modulus."""

import numpy as np
import pytest

from oases_svm.penalties import THETAS, Penalty

POINTS = 100_000


def drawn(name, count, seed):
    """Parameters in every regime: rho far below, at and far above the modulus, lambda 0, inputs at kinks."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lam = float(rng.choice([0.0, 1e-3, 0.1, 1.0, 5.0])) * rng.uniform(0.5, 2)
        theta = float({"scad": 2 + rng.exponential(2) + 1e-3}.get(name, rng.choice([0.05, 0.5, 3.0]) + rng.uniform()))
        penalty = Penalty(name, lam, theta)
        edge = penalty.modulus if np.isfinite(penalty.modulus) and penalty.modulus > 0 else 1.0
        yield penalty, float(edge * rng.choice([0.01, 0.5, 1.0, 1 + 1e-9, 1.5, 100.0])), rng


def costs(penalty, x, v, rho):
    return rho / 2 * (x - v) ** 2 + penalty.values(x)


@pytest.mark.parametrize("name", THETAS)
def test_prox_is_no_worse_than_any_other_point(name):
    """Brute force: a fine grid between 0 and v, which holds the minimum, then one about the best of it."""
    sets, grid = 100, np.linspace(0.0, 1.0, 201)
    for penalty, rho, rng in drawn(name, sets, seed=0):
        scale = 3 * max(penalty.lam * penalty.shape, penalty.lam / rho, penalty.shape, 1e-3)
        v = rng.uniform(-scale, scale, POINTS // sets)
        v[:4] = [0.0, penalty.lam, penalty.shape, penalty.lam * penalty.shape]
        x = penalty.prox(v, rho)
        assert np.all(x * v >= 0)
        assert np.all(np.abs(x) <= np.abs(v) + 1e-12)
        tried = v[:, None] * grid
        best = tried[np.arange(len(v)), costs(penalty, tried, v[:, None], rho).argmin(1)]
        width = np.abs(v) / 200
        tried = np.concatenate([tried, best[:, None] + width[:, None] * np.linspace(-1, 1, 201)], axis=1)
        least = costs(penalty, tried, v[:, None], rho).min(1)
        assert np.all(costs(penalty, x, v, rho) <= least + 1e-12 * (1 + least))


@pytest.mark.parametrize("name", THETAS)
def test_prox_takes_a_step_size_for_each_point(name):
    v, rho = np.linspace(-4, 4, 9), np.geomspace(0.01, 100, 9)
    penalty = Penalty(name, 0.7)
    assert np.array_equal(penalty.prox(v, rho), [penalty.prox(a, b) for a, b in zip(v, rho, strict=True)])


@pytest.mark.parametrize("name", THETAS)
def test_slopes_are_derivatives_and_lie_in_the_subdifferential(name):
    penalty, w = Penalty(name, 0.7), np.random.default_rng(0).uniform(-4, 4, 1000)
    step = 1e-6
    numeric = (penalty.values(np.abs(w) + step) - penalty.values(np.abs(w) - step)) / (2 * step)
    smooth = np.abs(numeric - penalty.slopes(w)) < 1e-5
    assert smooth.mean() > 0.99  # a few straddle a kink
    low, high = penalty.subdifferential(w)
    assert np.allclose(low, np.sign(w) * penalty.slopes(w))
    assert np.allclose(low, high)
    low, high = penalty.subdifferential(np.zeros(1))
    assert (-low[0], high[0]) == (penalty.slope_at_zero, penalty.slope_at_zero)


def test_the_kink_of_capped_l1_has_both_slopes():
    low, high = Penalty("capped_l1", 2.0, 0.5).subdifferential(np.array([0.5, -0.5]))
    assert low.tolist() == [0.0, -2.0]
    assert high.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("name", ["scad", "mcp", "lsp"])
def test_the_modulus_is_the_least_that_makes_it_convex(name):
    penalty = Penalty(name, 0.7, 2.5)
    w = np.linspace(0, 4, 4001)
    bend = np.diff(penalty.values(w), 2) / (w[1] - w[0]) ** 2
    assert bend.min() == pytest.approx(-penalty.modulus, rel=2e-2)


@pytest.mark.parametrize(
    ("name", "theta"), [("scad", 2.0), ("scad", -1), ("mcp", 0), ("lsp", 0.0), ("capped_l1", -3)]
)
def test_theta_out_of_range_is_refused(name, theta):
    with pytest.raises(ValueError, match=f"theta={theta} must be above"):
        Penalty(name, 1.0, theta)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ridge", 1.0), "penalty='ridge' is unknown"),
        (("mcp", -1.0), "lam=-1.0 must be 0 or more"),
        (("mcp", float("nan")), "lam=nan must be finite"),
        (("mcp", "1"), "lam='1' must be a number"),
        (("mcp", 1.0, float("inf")), "theta=inf must be finite"),
    ],
)
def test_bad_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Penalty(*arguments)


@pytest.mark.parametrize("name", ["scad", "mcp", "capped_l1", "l1", "lsp"])
def test_flattened_is_where_the_slope_is_none(name):
    penalty = Penalty(name, 0.3)
    w = np.array([0.0, 0.1, -0.2, 5.0])
    flat = penalty.flattened(w)
    assert flat[0] == 0
    assert np.array_equal(np.sign(flat), np.sign(w))
    if name in ("l1", "lsp"):
        assert np.array_equal(flat, w)
    else:
        assert np.all(penalty.slopes(flat)[1:] == 0)
        assert flat[3] == 5.0
