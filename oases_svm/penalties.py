"""Penalties with little or no shrinkage of large coefficients: values, slopes, subdifferentials, proximal maps.

With a = |w|, p is
    l1         lambda a
    scad       lambda a up to lambda; (-a^2 + 2 theta lambda a - lambda^2) / (2 (theta - 1)) up to theta lambda;
               (theta + 1) lambda^2 / 2 beyond; theta > 2
    mcp        lambda a - a^2 / (2 theta) up to theta lambda; theta lambda^2 / 2 beyond; theta > 0
    lsp        lambda log(1 + a / theta); theta > 0
    capped_l1  lambda min(a, theta); theta > 0
(Guan et al., arXiv 1809.03655, section 2). The proximal maps are valid for every step size, not for 1 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

THETAS = {"scad": 3.7, "mcp": 3.0, "lsp": 0.1, "capped_l1": 0.5, "l1": 1.0}
"""Default theta of each penalty; l1 has none and ignores it."""
_ABOVE = {"scad": 2.0, "mcp": 0.0, "lsp": 0.0, "capped_l1": 0.0}


@dataclass(frozen=True)
class Penalty:
    """Penalty with its parameters. Raises ValueError for an unknown name, theta out of range or negative lambda."""

    name: str
    lam: float
    theta: float | None = None

    def __post_init__(self) -> None:
        if self.name not in THETAS:
            raise ValueError(f"penalty={self.name!r} is unknown; known are {', '.join(map(repr, THETAS))}")
        _require_number("lam", self.lam)
        if self.lam < 0:
            raise ValueError(f"lam={self.lam} must be 0 or more")
        theta = THETAS[self.name] if self.theta is None else self.theta
        _require_number("theta", theta)
        if self.name in _ABOVE and theta <= _ABOVE[self.name]:
            raise ValueError(
                f"theta={theta} must be above {_ABOVE[self.name]:g} for penalty={self.name!r}; "
                f"None takes {THETAS[self.name]}"
            )
        object.__setattr__(self, "lam", float(self.lam))
        object.__setattr__(self, "theta", float(theta))

    @property
    def shape(self) -> float:
        """The theta in use."""
        assert self.theta is not None
        return self.theta

    @property
    def modulus(self) -> float:
        """Modulus of weak convexity: p(w) + modulus w^2 / 2 is convex. Infinite for capped_l1, which has a concave
        kink.
        """
        if self.lam == 0:
            return 0.0
        theta = self.shape
        if self.name == "scad":
            return 1 / (theta - 1)
        if self.name == "mcp":
            return 1 / theta
        if self.name == "lsp":
            return self.lam / theta**2
        return np.inf if self.name == "capped_l1" else 0.0

    @property
    def slope_at_zero(self) -> float:
        """Right derivative at 0: a zero coefficient needs a larger correlation to become nonzero."""
        return self.lam / self.shape if self.name == "lsp" else self.lam

    @property
    def flat_from(self) -> float:
        """|w| from which p is constant; infinite if it never is."""
        theta = self.shape
        known = {"scad": theta * self.lam, "mcp": theta * self.lam, "capped_l1": theta}
        return known.get(self.name, np.inf) if self.lam else 0.0

    def flattened(self, w: Any) -> Floats:
        """w without the nonzero coefficients in the flat part of p, which are free of the penalty there."""
        w = np.asarray(w, dtype=float)
        end = self.flat_from
        return w if not np.isfinite(end) else np.where(w == 0, 0.0, np.copysign(np.maximum(np.abs(w), end), w))

    def values(self, w: Any) -> Floats:
        """p, element-wise."""
        a, lam, theta = np.abs(np.asarray(w, dtype=float)), self.lam, self.shape
        if self.name == "l1":
            return np.asarray(lam * a)
        if self.name == "lsp":
            return np.asarray(lam * np.log1p(a / theta))
        if self.name == "capped_l1":
            return np.asarray(lam * np.minimum(a, theta))
        a = np.minimum(a, theta * lam)
        if self.name == "mcp":
            return np.asarray(a * (lam - a / (2 * theta)))
        return np.asarray(np.where(a <= lam, lam * a, lam * a - (a - lam) ** 2 / (2 * (theta - 1))))

    def value(self, w: Any) -> float:
        """p summed over the coefficients."""
        return float(self.values(w).sum())

    def slopes(self, w: Any) -> Floats:
        """Derivative of p in a = |w| (from the right at kinks): weights of the linearised penalty."""
        a, lam, theta = np.abs(np.asarray(w, dtype=float)), self.lam, self.shape
        if self.name == "l1":
            return np.full_like(a, lam)
        if self.name == "lsp":
            return np.asarray(lam / (theta + a))
        if self.name == "capped_l1":
            return np.asarray(np.where(a < theta, lam, 0.0))
        if self.name == "mcp":
            return np.asarray(np.maximum(lam - a / theta, 0.0))
        return np.asarray(np.where(a <= lam, lam, np.maximum(theta * lam - a, 0.0) / (theta - 1)))

    def subdifferential(self, w: Any) -> tuple[Floats, Floats]:
        """Bounds of p's Clarke subdifferential, element-wise."""
        w = np.asarray(w, dtype=float)
        slope = self.slopes(w)
        low, high = np.sign(w) * slope, np.sign(w) * slope
        at_zero = w == 0
        low, high = np.where(at_zero, -self.slope_at_zero, low), np.where(at_zero, self.slope_at_zero, high)
        if self.name == "capped_l1":
            kink = np.abs(w) == self.shape
            low = np.where(kink, np.minimum(0.0, np.sign(w) * self.lam), low)
            high = np.where(kink, np.maximum(0.0, np.sign(w) * self.lam), high)
        return low, high

    def prox(self, v: Any, rho: Any) -> Floats:
        """Proximal map: the x that minimises rho/2 (x - v)^2 + p(x), element-wise; rho > 0, a number or one per v.

        Exact also where the sum is not convex (rho at or below `modulus`), because every stationary point and every
        end of a piece is tried. Of two minima the smaller in size is returned.
        """
        v, rho = np.broadcast_arrays(np.asarray(v, dtype=float), np.asarray(rho, dtype=float))
        u = np.abs(v)
        # Clips handle the limit of a division by zero, and `where` removes candidates that are not finite.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            candidates = np.stack([np.zeros_like(u), *self._candidates(u, rho)])
            candidates = np.where(np.isfinite(candidates), np.maximum(candidates, 0.0), 0.0)
        candidates.sort(axis=0)
        costs = rho / 2 * (candidates - u) ** 2 + self.values(candidates)
        best = np.take_along_axis(candidates, costs.argmin(axis=0)[None], axis=0)[0]
        return np.asarray(np.where(np.signbit(v), -best, best) + 0.0)

    def _candidates(self, u: Floats, rho: Floats) -> list[Floats]:
        """Candidates for the minimum over x >= 0 besides 0, for u >= 0."""
        lam, theta = self.lam, self.shape
        soft = u - lam / rho
        if self.name == "l1":
            return [soft]
        if self.name == "capped_l1":
            return [np.clip(soft, 0.0, theta), np.maximum(u, theta)]
        if self.name == "lsp":
            root = np.sqrt((u - theta) ** 2 - 4 * (lam / rho - u * theta))  # nan if there is none
            return [0.5 * (u - theta - root), 0.5 * (u - theta + root)]
        end = np.full_like(u, theta * lam)
        if self.name == "mcp":
            return [np.clip((rho * u - lam) / (rho - 1 / theta), 0.0, theta * lam), np.maximum(u, end), end]
        middle = (rho * u * (theta - 1) - theta * lam) / (rho * (theta - 1) - 1)
        return [
            np.clip(soft, 0.0, lam), np.clip(middle, lam, theta * lam), np.maximum(u, end), end, np.full_like(u, lam)
        ]  # fmt: skip


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{name}={value!r} must be a number")
    if not np.isfinite(value):
        raise ValueError(f"{name}={value} must be finite")
