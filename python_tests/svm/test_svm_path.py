"""Paths, their first lambda, the information criterion, cross-validation and the picture."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from svm_data import breast_cancer, drawn

from oases.svm import NonconvexSVC, NonconvexSVCCV, plot_path, svc_path
from oases_svm.penalties import THETAS


@pytest.mark.parametrize("name", THETAS)
def test_the_path_begins_at_the_largest_useful_lambda(name):
    x, y = breast_cancer()
    path = svc_path(x, y, penalty=name, n_lambdas=12)
    assert path.nonzeros[0, 0] == 0
    assert path.residuals.max() <= 1e-6
    below = svc_path(x, y, penalty=name, lams=[0.99 * path.lams[0]])
    assert below.nonzeros[0, 0] > 0
    assert np.all(np.diff(path.lams) < 0)


def test_an_l1_path_is_a_fit_for_every_lambda():
    x, y = drawn(60, 90)
    path = svc_path(x, y, penalty="l1", n_lambdas=8)
    for k, lam in enumerate(path.lams):
        model = NonconvexSVC("l1", lam=lam).fit(x, y)
        assert path.objectives[0, k] == pytest.approx(model.objective_, rel=1e-8)
        hinge = np.maximum(0, 1 - (2 * y - 1) * (x @ path.coefs[0, :, k] + path.intercepts[0, k]))
        assert path.bic[0, k] == pytest.approx(hinge.sum() + np.log(60) * path.nonzeros[0, k])


def test_a_path_of_three_classes_predicts():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 90)
    x = rng.standard_normal((90, 5))
    x[:, :3] += 4 * np.eye(3)[y]
    path = svc_path(x, y, n_lambdas=6)
    assert path.coefs.shape == (3, 5, 6)
    assert (path.predict(x)[:, -1] == y).mean() > 0.9


@pytest.mark.parametrize("name", ["scad", "mcp", "lsp", "capped_l1"])
def test_a_search_finds_what_is_no_higher(name):
    x, y = drawn(80, 120, noise=0.5)
    lams = np.geomspace(0.3, 0.01, 8) * (0.1 if name == "lsp" else 1.0)
    near = svc_path(x, y, penalty=name, lams=lams, search=False)
    low = svc_path(x, y, penalty=name, lams=lams)
    assert max(near.residuals.max(), low.residuals.max()) <= 1e-6
    moving = low.nonzeros[0] > 0
    assert np.all(low.objectives[0, moving] <= near.objectives[0, moving] * (1 + 1e-9))
    for k in (3, 6):
        model = NonconvexSVC(name, lam=lams[k], search=False).fit(x, y)
        assert model.dual_residual_ <= 1e-6
        assert NonconvexSVC(name, lam=lams[k]).fit(x, y).objective_ <= model.objective_ * (1 + 1e-9)


@pytest.mark.parametrize("name", THETAS)
@pytest.mark.parametrize("search", [True, False])
def test_every_point_of_a_path_is_stationary(name, search):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 5))
    y = x[:, 0] + 0.5 * rng.standard_normal(60) > 0
    assert svc_path(x, y, penalty=name, search=search).residuals.max() <= 1e-6


def test_what_is_chosen_is_what_was_scored():
    """With the largest lambda a fold may have another solution than zero, which all data have."""
    x, y = drawn(100, 60, noise=0.3)
    for search in (None, True, False):
        model = NonconvexSVCCV("mcp", n_lambdas=10, search=search).fit(x, y)
        assert model.search_ in ((True, False) if search is None else (search,))
        k = int(np.flatnonzero(model.lams_ == model.lam_)[0])
        assert np.array_equal(model.coef_[0], model.path_.coefs[0, :, k])
        assert model.scores_[:, 0] == pytest.approx(np.maximum(np.mean(y), 1 - np.mean(y)), abs=0.06)
        assert model.multipliers_.shape == (1, 100)
        assert max(model.primal_residual_, model.dual_residual_) <= 1e-6


@pytest.mark.parametrize("criterion", ["cv", "bic"])
def test_lambda_is_chosen(criterion):
    x, y = drawn(150, 40, true=3, noise=0.2)
    model = NonconvexSVCCV("mcp", n_lambdas=15, criterion=criterion).fit(x, y)
    assert model.lam_ in model.lams_
    assert model.scores_.shape == (5 if criterion == "cv" else 1, 15)
    assert {0, 1, 2} <= set(np.flatnonzero(model.coef_[0]))
    assert model.score(x, y) > 0.85


def test_an_error_of_a_fold_names_the_estimator():
    x, y = drawn(30, 4)
    first = np.flatnonzero(y == 0)
    with pytest.raises(ValueError, match="NonconvexSVCCV needs samples of at least 2 classes"):
        NonconvexSVCCV(n_lambdas=2, cv=[(first, np.arange(30))]).fit(x, y)


def test_bad_grids_are_refused():
    x, y = drawn(30, 4)
    for parameters, message in [
        ({"lams": []}, "lams is empty"), ({"lams": [-1.0]}, "lam=-1.0 must be 0 or more"),
        ({"n_lambdas": 0}, "n_lambdas=0 must be"), ({"eps": 1.5}, "eps=1.5 must be between"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            svc_path(x, y, **parameters)
    with pytest.raises(ValueError, match="criterion='aic' is unknown"):
        NonconvexSVCCV(criterion="aic").fit(x, y)


def test_a_path_is_drawn():
    import matplotlib as mpl

    mpl.use("agg")
    x, y = drawn(60, 10)
    path = svc_path(x, y, n_lambdas=10)
    ax = plot_path(path)
    assert len(ax.lines) == np.any(path.coefs[0] != 0, axis=1).sum() + 1
    assert ax.get_xlabel() == "lambda"
