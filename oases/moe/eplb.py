"""Replication like DeepSeek's EPLB: the busiest expert gets one more replica, then replicas are packed.

An expert's owner is fixed, because its optimizer state is there; further replicas are packed into the free slots of
the devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oases.moe.costs import Costs
from oases.moe.placement_data import Chosen, Integers, owner_only, owner_ranks

Loads = NDArray[np.float64]


def eplb_placement(counts: Integers, costs: Costs, slots: int) -> Chosen:
    """Routes and copies. slots: replicas that a device may hold, at most as many as it owns experts.

    A device computes its own tokens for experts that it holds; tokens of other devices go to the replica with the
    fewest.
    """
    experts, devices = counts.shape
    slots = min(slots, experts // devices)
    home, loads = owner_ranks(experts, devices), counts.sum(1).astype(np.float64)
    number = _replicas(loads, experts + slots * devices, most=devices)
    share = loads / number
    # Heaviest replicas first, each to the lightest device that has a slot and no replica of it.
    weight = np.bincount(home, share, minlength=devices)
    free = np.full(devices, slots)
    copies: list[list[int]] = [[] for _ in range(experts)]
    for expert in np.argsort(-share, kind="stable").tolist():
        for _ in range(int(number[expert]) - 1):
            fits = [d for d in range(devices) if free[d] and d != home[expert] and d not in copies[expert]]
            if not fits:
                break
            device = min(fits, key=lambda d: (weight[d], d))
            copies[expert].append(device)
            weight[device] += share[expert]
            free[device] -= 1
    routes, _ = owner_only(counts)
    for expert, held in enumerate(copies):
        tokens = {device: int(counts[expert, device]) for device in (int(home[expert]), *held)}
        for device in np.argsort(-counts[expert], kind="stable").tolist():
            if device in tokens:
                routes[expert, device] = device
                continue
            least = min(tokens, key=tokens.__getitem__)
            routes[expert, device] = least
            tokens[least] += int(counts[expert, device])
    return routes, copies


def _replicas(loads: Loads, num_replicas: int, most: int) -> Integers:
    """Replicas per expert, at most `most` of one."""
    number = np.ones(len(loads), dtype=np.int64)
    share = loads.copy()
    for _ in range(num_replicas - len(loads)):
        busiest = int(np.argmax(share))
        if share[busiest] <= 0:
            break
        number[busiest] += 1
        share[busiest] = loads[busiest] / number[busiest] if number[busiest] < most else 0.0
    return number
