"""The estimator: scikit-learn's checks, known optima, first-order certificates, weights, classes, bad input."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator
from svm_data import breast_cancer, drawn, objective, violation

from oases.svm import NonconvexSVC, NonconvexSVCCV
from oases_svm.penalties import THETAS, Penalty

NAMES = tuple(THETAS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "penalty", ["scad", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mcp", "capped_l1", "l1"))]
)
def test_scikit_learn_excuses_nothing(penalty):
    model = NonconvexSVC(penalty)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own data, which is hard on purpose, and of checks it skips
        check_estimator(model)


@pytest.mark.slow
def test_scikit_learn_excuses_nothing_of_cross_validation():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(NonconvexSVCCV(n_lambdas=2, cv=2))


@pytest.mark.long
def test_it_needs_no_torch():
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ModuleNotFoundError('no torch', name='torch')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import oases.svm, numpy as np\n"
        "x = np.random.default_rng(0).standard_normal((20, 3))\n"
        "oases.svm.NonconvexSVC().fit(x, x[:, 0] > 0)\n"
        "import oases\nassert oases.svm.NonconvexSVC is oases.svm.estimator.NonconvexSVC\n"
        "import pickle\n"
        "assert pickle.loads(b'coases.svm.estimator\\nNonconvexSVC\\n.') is oases.svm.NonconvexSVC\n"
        "assert not [name for name in sys.modules if name.startswith(('torch', 'matplotlib'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "reached"),
    [("l1", 0.1290815), ("scad", 0.04437), ("mcp", 0.04250), ("lsp", 0.20534), ("capped_l1", 0.08448)],
)
def test_known_optima_of_breast_cancer(name, reached):
    """l1: the optimum; else no worse than reweighted linear programs."""
    x, y = breast_cancer()
    model = NonconvexSVC(name, lam=2**-6).fit(x, y)
    assert model.objective_ == pytest.approx(objective(model, x, y), rel=1e-12)
    assert model.objective_ <= reached * (1 + 1e-5)
    if name == "l1":
        assert model.objective_ == pytest.approx(reached, rel=1e-5)
    assert max(model.primal_residual_, model.dual_residual_) <= 1e-6
    assert violation(model, x, y) <= 1e-7


@pytest.mark.few(14, 1000)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "d", "lam"), [(60, 300, 0.05), (300, 20, 0.01), (40, 40, 0.0), (80, 10, 0.2)])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_every_answer_is_certified(name, n, d, lam, fit_intercept):
    x, y = drawn(n, d, seed=n)
    model = NonconvexSVC(name, lam=lam, fit_intercept=fit_intercept).fit(x, y)
    assert max(model.primal_residual_, model.dual_residual_) <= 1e-6
    assert violation(model, x, y) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_discrete_data_with_many_ties(name):
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (300, 12)).astype(float)
    y = (x[:, 0] + x[:, 1] + rng.standard_normal(300) > 0).astype(int)
    model = NonconvexSVC(name, lam=0.02).fit(x, y)
    assert max(model.primal_residual_, model.dual_residual_) <= 1e-6
    assert violation(model, x, y) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_sparse_is_dense(name):
    x, y = drawn(200, 40, noise=1.0)
    x[np.abs(x) < 1.2] = 0
    dense = NonconvexSVC(name, lam=0.03).fit(x, y)
    for kind in (sparse.csr_array, sparse.csc_matrix):
        other = NonconvexSVC(name, lam=0.03).fit(kind(x), y)
        assert other.objective_ == pytest.approx(dense.objective_, rel=1e-9)
        assert np.array_equal(other.predict(kind(x)), dense.predict(x))


def test_weights_are_repetitions():
    x, y = drawn(60, 10)
    weights = np.random.default_rng(0).integers(0, 4, 60)
    one = NonconvexSVC(lam=0.02).fit(x, y, sample_weight=weights)
    two = NonconvexSVC(lam=0.02).fit(np.repeat(x, weights, axis=0), np.repeat(y, weights))
    assert np.allclose(one.coef_, two.coef_, atol=1e-9)
    assert np.all(one.multipliers_[0][weights == 0] == 0)


def test_class_weights_are_sample_weights():
    x, y = drawn(80, 10)
    one = NonconvexSVC(lam=0.02, class_weight={0: 1.0, 1: 3.0}).fit(x, y)
    two = NonconvexSVC(lam=0.02).fit(x, y, sample_weight=np.where(y == 1, 3.0, 1.0))
    assert np.allclose(one.coef_, two.coef_, atol=1e-9)


def test_more_classes_are_problems_against_the_rest():
    rng = np.random.default_rng(0)
    y = np.array(["red", "green", "blue"])[rng.integers(0, 3, 120)]
    x = rng.standard_normal((120, 6))
    x[:, :3] += 3 * (y[:, None] == np.array(["blue", "green", "red"]))
    model = NonconvexSVC(lam=0.02).fit(x, y)
    assert model.coef_.shape == (3, 6)
    assert model.objective_.shape == (3,)
    assert model.score(x, y) > 0.9
    alone = NonconvexSVC(lam=0.02).fit(x, y == "green")
    assert np.allclose(alone.coef_[0], model.coef_[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_huge_lambda_answers_zero_at_once(name):
    x, y = drawn(50, 20)
    model = NonconvexSVC(name, lam=1e6).fit(x, y)
    assert not model.coef_.any()
    assert model.n_iter_ == 1
    assert violation(model, x, y) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_odd_columns_and_scales(name):
    """Constant, all-zero, duplicate and huge columns: certified, and nothing for what tells nothing."""
    x, y = drawn(90, 6)
    odd = np.column_stack([x, np.full(90, 7.0), np.zeros(90), x[:, 0], 1e8 * x[:, 1], np.full(90, 1e8)])
    model = NonconvexSVC(name, lam=0.02).fit(odd, y)
    assert max(model.primal_residual_, model.dual_residual_) <= 1e-6
    assert violation(model, odd, y) <= 1e-5
    assert not model.coef_[0][[6, 7, 10]].any()


def test_one_column():
    x, y = drawn(30, 1, noise=0.1)
    assert NonconvexSVC().fit(x, y).score(x, y) > 0.8


@pytest.mark.parametrize("labels", [("no", "yes"), (-5, 3), (False, True), (0, 1)])
def test_labels_of_any_kind(labels):
    x, y = drawn(40, 4)
    model = NonconvexSVC().fit(x, np.array(labels)[y])
    assert set(model.predict(x)) == set(labels)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"penalty": "ridge"}, "penalty='ridge' is unknown"),
        ({"penalty": "scad", "theta": 2.0}, "theta=2.0 must be above 2"),
        ({"penalty": "mcp", "theta": 0}, "theta=0 must be above 0"),
        ({"lam": -0.1}, "lam=-0.1 must be 0 or more"),
        ({"lam": np.nan}, "lam=nan must be finite"),
        ({"max_iter": 0}, "max_iter=0 must be an integer"),
        ({"tol": 0.0}, "tol=0.0 must be a number above 0"),
    ],
)
def test_bad_parameters(parameters, message):
    x, y = drawn(20, 3)
    with pytest.raises(ValueError, match=message):
        NonconvexSVC(**parameters).fit(x, y)


def test_bad_data():
    x, y = drawn(20, 3)
    with pytest.raises(ValueError, match="only one class: 1"):
        NonconvexSVC().fit(x, np.ones(20, dtype=int))
    with pytest.raises(ValueError, match="all weight is on one class"):
        NonconvexSVC().fit(x, y, sample_weight=y)
    with pytest.raises(ValueError, match="only one class"):
        NonconvexSVC().fit(x[:1], y[:1])
    with pytest.raises(ValueError, match="sample_weight must be 0 or more"):
        NonconvexSVC().fit(x, y, sample_weight=-np.ones(20))
    with pytest.raises(ValueError, match="NaN"):
        NonconvexSVC().fit(np.where(x > 1, np.nan, x), y)
    with pytest.raises(ValueError, match="continuous"):
        NonconvexSVC().fit(x, x[:, 0])


@pytest.mark.parametrize("weight", [-0.9, np.nan, np.inf])
def test_bad_class_weights_are_named(weight):
    x, y = drawn(20, 3)
    with pytest.raises(ValueError, match=f"class_weight of class 1 must be finite and 0 or more, got {weight}"):
        NonconvexSVC(class_weight={0: 1, 1: weight}).fit(x, y)


@pytest.mark.filterwarnings("error")
def test_a_weight_of_zero_is_a_class_that_is_not_there():
    x, y = drawn(60, 3)
    y = y + (x[:, 1] > 0)
    model = NonconvexSVC(class_weight={0: 0, 1: 1, 2: 1}).fit(x, y)
    other = NonconvexSVC().fit(x[y > 0], y[y > 0])
    assert np.array_equal(model.predict(x), other.predict(x))
    with pytest.raises(ValueError, match="all rows have weight 0; give two classes a class_weight"):
        NonconvexSVC(class_weight={0: 0, 1: 0, 2: 0}).fit(x, y)


@pytest.mark.parametrize("polish", [True, False])
def test_what_does_not_converge_warns(polish):
    x, y = drawn(100, 30)
    with pytest.warns(ConvergenceWarning, match="increase max_iter"):
        NonconvexSVC(lam=0.005, max_iter=3, polish=polish).fit(x, y)


def test_a_warm_start_is_no_worse():
    x, y = drawn(80, 60)
    model = NonconvexSVC("mcp", lam=0.02, warm_start=True).fit(x, y)
    first = model.objective_
    assert model.fit(x, y).objective_ <= first + 1e-12
    model.set_params(lam=0.05).fit(x[:, :10], y)  # other columns: nothing to begin at
    assert model.coef_.shape == (1, 10)


@pytest.mark.parametrize("name", ["scad", "mcp", "capped_l1"])
def test_of_equal_minima_the_least_coefficients_are_taken(name):
    """Where rows are told apart and the penalty is flat, every multiple is a minimum, too."""
    x, y = drawn(80, 10, true=3, noise=0.0)
    model = NonconvexSVC(name, lam=0.01, theta={"capped_l1": 0.01}.get(name)).fit(x, y)
    margin = (2 * y - 1) * model.decision_function(x)
    assert margin.min() == pytest.approx(1.0, abs=1e-6)
    twice = np.maximum(0, 1 - 2 * margin).mean() + Penalty(name, 0.01, model.theta).value(2 * model.coef_)
    assert twice == pytest.approx(model.objective_, abs=1e-9)
