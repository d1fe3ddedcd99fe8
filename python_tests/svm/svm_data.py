"""Data and a plain reference that tests share: the first-order condition, written apart from the product's."""

import numpy as np

THETA = {"scad": 3.7, "mcp": 3.0, "lsp": 0.1, "capped_l1": 0.5, "l1": 1.0}


def breast_cancer():
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    x, y = load_breast_cancer(return_X_y=True)
    x, _, y, _ = train_test_split(x, y, train_size=0.75, random_state=0, stratify=y)
    return (x - x.mean(0)) / x.std(0), y


def drawn(n, d, true=5, seed=0, noise=0.5):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d))
    w = np.zeros(d)
    w[:true] = rng.choice([-1.0, 1.0], min(true, d))
    return x, np.where(x @ w + noise * rng.standard_normal(n) > 0, 1, 0)


def penalty_value(name, lam, w, theta=None):
    a, theta = np.abs(w), theta or THETA[name]
    if name == "l1":
        return lam * a.sum()
    if name == "capped_l1":
        return lam * np.minimum(a, theta).sum()
    if name == "lsp":
        return lam * np.log(1 + a / theta).sum()
    if name == "mcp":
        return np.where(a <= theta * lam, lam * a - a**2 / (2 * theta), theta * lam**2 / 2).sum()
    middle = (-(a**2) + 2 * theta * lam * a - lam**2) / (2 * (theta - 1))
    return np.where(a <= lam, lam * a, np.where(a <= theta * lam, middle, (theta + 1) * lam**2 / 2)).sum()


def slope(name, lam, a, theta=None):
    theta = theta or THETA[name]
    if name == "l1":
        return np.full_like(a, lam)
    if name == "capped_l1":
        return lam * (a < theta)
    if name == "lsp":
        return lam / (theta + a)
    if name == "mcp":
        return np.maximum(lam - a / theta, 0)
    return np.where(a <= lam, lam, np.maximum(theta * lam - a, 0) / (theta - 1))


def violation(model, x, y, weights=None):
    """The largest violation of the first-order conditions, with the model's multipliers; one problem."""
    signs = np.where(y == model.classes_[1], 1.0, -1.0)
    c = np.full(len(y), 1 / len(y)) if weights is None else weights / weights.sum()
    w, b, alpha = model.coef_[0], model.intercept_[0], model.multipliers_[0]
    x = x.toarray() if hasattr(x, "toarray") else x
    margin = signs * (x @ w + b)
    found = [np.maximum(-alpha, alpha - c).max()]
    # The hinge's subdifferential: c where the margin is below 1, 0 above, anything between at 1.
    found += [np.abs(alpha - c)[margin < 1 - 1e-6].max(initial=0), alpha[margin > 1 + 1e-6].max(initial=0)]
    force = x.T @ (alpha * signs)
    edges = slope(model.penalty, model.lam, np.abs(w), model.theta)
    found.append(np.abs(force - np.sign(w) * edges)[w != 0].max(initial=0))
    found.append((np.abs(force) - edges)[w == 0].max(initial=0))
    if model.fit_intercept:
        found.append(abs(alpha @ signs))
    return max(found)


def objective(model, x, y):
    signs = np.where(y == model.classes_[1], 1.0, -1.0)
    hinge = np.maximum(0, 1 - signs * (x @ model.coef_[0] + model.intercept_[0])).mean()
    return hinge + penalty_value(model.penalty, model.lam, model.coef_[0], model.theta)
