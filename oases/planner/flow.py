"""The chain's programme as a flow for HiGHS: binary states, edges that may be fractions, one row for the capacity.

What flows in along a node's edges is its state variable, and so is what flows out: without the capacity the vertices
of this polytope are paths, so the relaxation is as tight as the Lagrangian bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

if TYPE_CHECKING:
    from oases.planner.programme import _Dense

TOLERANCE = 2e-6
"""By how much HiGHS may overstep a row, relatively, with room to spare."""


def solve_flow(
    chain: _Dense, capacity: float, gap: float, time_limit: float
) -> tuple[list[int] | None, float, float]:
    """Places, cost and a lower bound; no places where nothing was found within the capacity."""
    places, cost, bound = _solve(chain, capacity, capacity, gap, time_limit)
    if places is None and cost < np.inf:  # its answer oversteps the capacity by the solver's tolerance
        places, cost, _ = _solve(chain, capacity, capacity * (1 - TOLERANCE), gap, time_limit)
    return places, cost, bound


def _solve(
    chain: _Dense, capacity: float, limit: float, gap: float, time_limit: float
) -> tuple[list[int] | None, float, float]:
    nodes, most = chain.costs.shape
    node, state = np.nonzero(np.isfinite(chain.costs))
    number = np.full((nodes, most), -1)
    number[node, state] = np.arange(len(node))
    at, a, b = np.nonzero(np.isfinite(chain.edges) & (number[:-1, :, None] >= 0) & (number[1:, None, :] >= 0))
    edge = len(node) + np.arange(len(at))
    leaves, enters = number[at, a], number[at + 1, b]
    outward, inward = np.flatnonzero(node < nodes - 1), np.flatnonzero(node > 0)

    # Rows: one state for node 0 (the flow carries the one through the chain); out of a state; into a state; capacity.
    first = np.flatnonzero(node == 0)
    out_row = np.full(len(node), -1)
    out_row[outward] = 1 + np.arange(len(outward))
    in_row = np.full(len(node), -1)
    in_row[inward] = 1 + len(outward) + np.arange(len(inward))
    last = 1 + len(outward) + len(inward)
    weights = chain.weights[node, state]
    rows = [np.zeros_like(first), out_row[outward], out_row[leaves], in_row[inward], in_row[enters], last + 0 * node]
    columns = [first, outward, edge, inward, edge, np.arange(len(node))]
    values = [
        1.0 + 0 * first,
        -1.0 + 0 * outward,
        1.0 + 0 * edge,
        -1.0 + 0 * inward,
        1.0 + 0 * edge,
        weights / capacity,
    ]
    total = len(node) + len(edge)
    matrix = csr_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(last + 1, total)
    )
    low, high = np.zeros(last + 1), np.zeros(last + 1)
    low[0] = high[0] = 1.0
    low[last], high[last] = -np.inf, limit / capacity
    costs = np.concatenate([chain.costs[node, state], chain.edges[at, a, b]])
    scale = max(float(np.abs(costs).max()), 1e-300)  # the solver's tolerances are absolute
    integral = np.concatenate([np.ones(len(node)), np.zeros(len(edge))])
    result = milp(
        costs / scale, integrality=integral, bounds=Bounds(0, 1), constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.5 * gap, "time_limit": time_limit},
    )  # fmt: skip
    bound = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) * scale
    if result.status == 2:
        return None, np.inf, np.inf
    if result.x is None:
        return None, np.inf, bound
    chosen = np.flatnonzero(result.x[: len(node)] > 0.5)
    places = [int(place) for place in state[chosen]]
    cost = float(costs[chosen].sum())
    cost += sum(float(chain.edges[i, p, q]) for i, (p, q) in enumerate(zip(places, places[1:], strict=False)))
    if chain.weights[np.arange(nodes), places].sum() > capacity:
        return None, cost, bound
    return places, cost, bound
