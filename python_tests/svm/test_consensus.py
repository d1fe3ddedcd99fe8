"""The data-parallel version: every rank gets what one process gets, or better."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from svm_data import drawn, objective, violation

from oases.svm import NonconvexSVC


def fitted(part, x, y, name):
    import torch.distributed as dist

    rank = dist.get_rank()
    rows = slice(0, part) if rank == 0 else slice(part, None)
    return NonconvexSVC(name, lam=0.03, process_group=dist.group.WORLD).fit(x[rows], y[rows])


def answer(part, x, y, name):
    model = fitted(part, x, y, name)
    return {key: value for key, value in vars(model).items() if key != "process_group"}


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["l1", "scad", "mcp"])
@pytest.mark.parametrize("shape", [(90, 30), (60, 260)])
def test_two_ranks_fit_as_one(two_ranks, name, shape):
    x, y = drawn(*shape)
    one = NonconvexSVC(name, lam=0.03).fit(x, y)
    found = two_ranks.run(answer, 25, x, y, name)
    assert np.array_equal(found[0]["coef_"], found[1]["coef_"])
    model = NonconvexSVC(name, lam=0.03)
    vars(model).update(found[0])
    assert objective(model, x, y) == pytest.approx(model.objective_, rel=1e-9)
    assert violation(model, x, y) <= 1e-6
    if name == "l1":
        assert model.objective_ == pytest.approx(one.objective_, rel=1e-8)


@pytest.mark.long
def test_a_rank_may_lack_a_class(two_ranks):
    x, y = drawn(60, 5)
    order = np.argsort(y)
    found = two_ranks.run(answer, int((y == 0).sum()), x[order], y[order], "l1")
    one = NonconvexSVC("l1", lam=0.03).fit(x, y)
    assert found[0]["objective_"] == pytest.approx(one.objective_, rel=1e-8)


def accuracies(x, y):
    import torch.distributed as dist
    from sklearn.base import clone
    from sklearn.model_selection import cross_val_score

    rows = slice(dist.get_rank(), None, 2)
    model = NonconvexSVC(lam=0.03, process_group=dist.group.WORLD)
    assert clone(model).process_group is dist.group.WORLD
    assert model.process_group is dist.group.WORLD
    return cross_val_score(model, x[rows], y[rows], cv=3)


@pytest.mark.long
def test_a_group_goes_with_a_clone(two_ranks):
    x, y = drawn(120, 6, noise=0.2)
    assert np.min(two_ranks.run(accuracies, x, y)) > 0.6


def refusal(bad):
    import torch.distributed as dist

    rows = np.random.default_rng(0).standard_normal((20, 3))
    labels = (rows[:, 0] > 0).astype(int)
    data, parameters = {"X": rows, "y": labels}, {}
    if dist.get_rank():
        data |= {
            "NaN": {"X": np.where(rows > 1, np.nan, rows)}, "rows": {"X": rows[:0], "y": labels[:0]},
            "features": {"X": rows[:, :2]}, "weights": {"sample_weight": -np.ones(20)},
            "continuous": {"y": rows[:, 1]}, "strings": {"y": np.where(labels, "yes", "no")},
        }.get(bad, {})  # fmt: skip
        parameters = {"lam": {"lam": -1}, "class weights": {"class_weight": {0: 1, 1: -2}}}.get(bad, {})
    try:
        NonconvexSVC(process_group=dist.group.WORLD, **parameters).fit(**data)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("lam", "rank 1: lam=-1 must be 0 or more"),
        ("NaN", "rank 1: Input X contains NaN"),
        ("rows", "rank 1: Found array with 0 sample"),
        ("features", "the number of features differs between ranks: 3 on rank 0, 2 on rank 1"),
        ("weights", "rank 1: sample_weight must be 0 or more, got -1.0"),
        ("class weights", "rank 1: class_weight of class 1 must be finite and 0 or more, got -2.0"),
        ("continuous", "rank 1: Unknown label type: continuous"),
        ("strings", "the kind of labels differs between ranks: numbers on rank 0, strings on rank 1"),
    ],
)
def test_what_is_bad_on_one_rank_is_refused_on_all(two_ranks, bad, message):
    first, second = two_ranks.run(refusal, bad)
    assert first.startswith(message)
    assert second == first


def weighed_by_class(class_weight):
    """Classes and weights of a fit whose ranks have two of three classes each, or its error."""
    import torch.distributed as dist

    labels = np.arange(20) % 2 + dist.get_rank()
    rows = np.random.default_rng(dist.get_rank()).standard_normal((20, 3)) + labels[:, None]
    try:
        model = NonconvexSVC(process_group=dist.group.WORLD, class_weight=class_weight).fit(rows, labels)
    except ValueError as error:
        return str(error)
    return model.classes_.tolist(), model.coef_.tolist()


def test_weights_of_classes_that_a_rank_lacks(two_ranks):
    first, second = two_ranks.run(weighed_by_class, {0: 2.0})
    assert first == second
    assert first[0] == [0, 1, 2]
    assert two_ranks.run(weighed_by_class, {7: 2.0}) == ["class_weight has 7, which is no class of any rank"] * 2
