"""The chain's programme as a flow for HiGHS: binary states, edges that may be fractions, one row for the capacity.

What flows in along a node's edges is its state variable, and so is what flows out: without the capacity the vertices
of this polytope are paths, so the relaxation is as tight as the Lagrangian bound.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from oases.planner.chain import Dense

TOLERANCE = 2e-6
"""By how much HiGHS may overstep a row, relatively, with room to spare."""
LEAST_GAP = 1e-6
"""Relative gap that its arithmetic can vouch for."""


def solve_flow(chain: Dense, capacity: float, gap: float, time_limit: float) -> tuple[list[int] | None, float, float]:
    """Places, cost and a lower bound; no places where nothing was found within the capacity.

    capacity: finite. time_limit: in seconds.
    """
    places, cost, bound = _solve(chain, capacity, capacity, gap, time_limit)
    if places is None and cost < np.inf:  # its answer oversteps the capacity by the solver's tolerance
        limit = capacity - TOLERANCE * max(1.0, abs(capacity))
        places, cost, _ = _solve(chain, capacity, limit, gap, time_limit)
    return places, cost, bound


def _solve(
    chain: Dense, capacity: float, limit: float, gap: float, time_limit: float
) -> tuple[list[int] | None, float, float]:
    # Here, for the ranks of a run read plans and solve none.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, csr_array, eye_array, hstack, vstack

    nodes, most = chain.costs.shape
    node, state = np.nonzero(np.isfinite(chain.costs))
    number = np.full((nodes, most), -1)
    number[node, state] = np.arange(len(node))
    at, a, b = np.nonzero(np.isfinite(chain.edges) & (number[:-1, :, None] >= 0) & (number[1:, None, :] >= 0))
    size, ones, edge = (len(node), len(at)), np.ones(len(at)), np.arange(len(at))
    leave = hstack([eye_array(size[0]), -coo_array((ones, (number[at, a], edge)), size)], format="csr")
    enter = hstack([eye_array(size[0]), -coo_array((ones, (number[at + 1, b], edge)), size)], format="csr")
    one = np.concatenate([node == 0, np.zeros(len(at))])  # the flow carries it through the chain
    scale = max(1.0, abs(capacity))
    weigh = np.concatenate([chain.weights[node, state] / scale, np.zeros(len(at))])
    conserved = [leave[node < nodes - 1], enter[node > 0]]
    matrix = vstack([*conserved, csr_array(one[None, :]), csr_array(weigh[None, :])], format="csr")
    low, high = np.zeros((2, matrix.shape[0]))
    low[-2] = high[-2] = 1.0
    low[-1], high[-1] = -np.inf, limit / scale

    costs = np.concatenate([chain.costs[node, state], chain.edges[at, a, b]])
    largest = max(float(np.abs(costs).max()), 1e-300)  # the solver's tolerances are absolute
    result = milp(
        costs / largest,
        integrality=np.concatenate([np.ones(len(node)), np.zeros(len(at))]),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": max(gap, LEAST_GAP) / 2, "time_limit": time_limit},
    )
    infeasible = result.status == 2
    if infeasible:
        return None, np.inf, np.inf
    bound = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) * largest
    if result.x is None:
        return None, np.inf, bound
    chosen = np.flatnonzero(result.x[: len(node)] > 0.5)
    places = [int(place) for place in state[chosen]]
    cost = float(costs[chosen].sum()) + sum(float(chain.edges[i][pair]) for i, pair in enumerate(pairwise(places)))
    fits = chain.weights[np.arange(nodes), places].sum() <= capacity
    return (places if fits else None), cost, bound
