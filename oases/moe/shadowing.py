"""FasterMoE's shadowing: the heaviest experts are replicated on all devices while the modelled time falls.

Source: FasterMoE (PPoPP 2022), as described in Pro-Prophet's evaluation (arXiv 2411.10003).
"""

from __future__ import annotations

import numpy as np

from oases.moe.costs import Costs
from oases.moe.placement_data import Chosen, Integers, make_placement, owner_only, owner_ranks


def shadowing_placement(counts: Integers, costs: Costs, slots: int) -> Chosen:
    """Routes and copies. slots: replicas that a device may hold, besides the experts it owns."""
    experts, devices = counts.shape
    home, everyone = owner_ranks(experts, devices), np.arange(devices)
    best = owner_only(counts)
    seconds = make_placement("", counts, costs, best).predicted_seconds
    held = np.zeros(devices, dtype=np.int64)
    for expert in np.argsort(-counts.sum(1), kind="stable").tolist():
        others = everyone[everyone != home[expert]]
        held[others] += 1
        if devices == 1 or held.max() > slots:
            break
        routes, copies = best[0].copy(), list(best[1])
        routes[expert], copies[expert] = everyone, others.tolist()
        after = make_placement("", counts, costs, (routes, copies)).predicted_seconds
        if after >= seconds:
            break
        best, seconds = (routes, copies), after
    return best
