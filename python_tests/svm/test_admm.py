"""ADMM alone, its normal equations, and vertices of the linear program, beside plain references."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse
from svm_data import breast_cancer, drawn

from oases_svm import NonconvexSVC, factor
from oases_svm.design import Design
from oases_svm.factor import DenseMatrix, NormalEquations, SparseMatrix


@pytest.mark.parametrize(("n", "d"), [(40, 15), (15, 40)])
@pytest.mark.parametrize("kind", ["dense", "sparse", "iterated"])
def test_normal_equations(n, d, kind, monkeypatch):
    x, y = drawn(n, d)
    x[np.abs(x) < 0.7] = 0
    weights = np.random.default_rng(0).uniform(0.5, 1.5, n)
    weights /= weights.sum()
    monkeypatch.setattr(factor, "FACTORISED", 0 if kind == "iterated" else 3000)
    design = Design(x if kind == "dense" else sparse.csr_array(x), 2.0 * y - 1, weights, True)
    h = design.columns(np.arange(d))
    matrix = DenseMatrix(h) if kind == "dense" else SparseMatrix(design)
    assert matrix.factorised == (kind != "iterated")
    right = np.random.default_rng(1).standard_normal(d)
    w = NormalEquations(matrix, weights, 0.3).solve(right)
    assert np.allclose(h.T @ (weights * (h @ w)) + 0.3 * w, right)


@pytest.mark.parametrize("intercept", [True, False])
def test_moments_of_sparse_are_those_of_dense(intercept):
    x, y = drawn(50, 8)
    x[np.abs(x) < 0.7] = 0
    x[:, 0], x[:, 1] = 0, 3
    dense, other = (Design(a, 2.0 * y - 1, np.full(50, 0.02), intercept) for a in (x, sparse.csr_array(x)))
    assert dense.usable.tolist() == [False, not intercept] + 6 * [True]
    for a, b in zip(dense.moments, other.moments, strict=True):
        assert np.allclose(a, b)
    assert np.allclose(dense.columns([2, 5]), other.columns([2, 5]))


@pytest.mark.long
def test_it_comes_to_the_optimum_of_l1():
    x, y = breast_cancer()
    model = NonconvexSVC("l1", lam=2**-6, polish=False, max_iter=20_000, tol=1e-5).fit(x, y)
    assert model.objective_ == pytest.approx(0.1290815, rel=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["scad", "mcp"])
@pytest.mark.parametrize("shape", [(100, 20), (40, 120)])
def test_it_stops_on_both_residuals(name, shape):
    x, y = drawn(*shape)
    model = NonconvexSVC(name, lam=0.02, polish=False, max_iter=20_000, tol=1e-5).fit(x, y)
    assert max(model.primal_residual_, model.dual_residual_) <= 1e-5
    assert model.objective_ < 1
    assert model.n_iter_ < 20_000
