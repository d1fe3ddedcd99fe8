"""Replication in the manner of DeepSeek's EPLB: the busiest expert gets one more replica, then replicas are packed.

`rebalance` is the whole algorithm on its own: nodes, devices and slots, every expert anywhere. `replicated` is what
a `Placement` takes of it: an expert's home stays, because its optimizer state is there, and further replicas are
packed into the slots that the devices have besides.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.placement import Chosen, Integers, at_home, homes

Loads = NDArray[np.float64]


def replicated(counts: Integers, costs: Costs, slots: int) -> Chosen:
    """Routes and copies. slots: copies that a device may hold; where more fit, as many as it has experts at home.

    A device computes its own tokens for what it holds; those of the others go to the replica with the fewest.
    """
    experts, devices = counts.shape
    slots = min(slots, experts // devices)
    home, loads = homes(experts, devices), counts.sum(1).astype(np.float64)
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
    routes, _ = at_home(counts)
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


def rebalance(loads: ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_devices: int) -> Integers:
    """EPLB: which expert each physical slot holds, [layer, slot], slots of a device side by side.

    loads: [layer, expert]. num_groups: of experts that a router picks together; where the nodes divide them, whole
    groups are packed to nodes and replicas are made within a node. UsageError for sizes that do not divide.
    """
    found = np.atleast_2d(np.asarray(loads, dtype=np.float64))
    experts = found.shape[1]
    for what, number, by in (("replicas", num_replicas, num_devices), ("devices", num_devices, num_nodes),
                             ("experts", experts, num_groups)):  # fmt: skip
        if by < 1 or number % by:
            raise UsageError(f"rebalance: {number} {what} do not divide by {by}")
    if num_replicas < experts:
        raise UsageError(f"rebalance: {num_replicas} replicas are fewer than {experts} experts")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1  # groups cannot stay whole: one node holds all
    return np.stack([_of_layer(layer, num_replicas, num_groups, num_nodes, num_devices) for layer in found])


def _of_layer(loads: Loads, num_replicas: int, num_groups: int, num_nodes: int, num_devices: int) -> Integers:
    size = len(loads) // num_groups
    packs = _packed(loads.reshape(num_groups, size).sum(1), num_nodes)
    slots: list[Integers] = []
    for groups in packs:
        mine = (np.array(groups)[:, None] * size + np.arange(size)).ravel()  # this node's experts
        holds, number = _grown(loads[mine], num_replicas // num_nodes)
        share = (loads[mine] / number)[holds]
        slots += [mine[holds[pack]] for pack in _packed(share, num_devices // num_nodes)]
    return np.concatenate(slots)


def _packed(weights: Loads, packs: int) -> list[list[int]]:
    """Items, the heaviest first, each to the lightest pack that is not full; all packs have equally many."""
    most = len(weights) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    if most == 1:
        return [[item] for item in range(packs)]
    total = [0.0] * packs
    for item in np.argsort(-weights, kind="stable").tolist():
        pack = min((p for p in range(packs) if len(found[p]) < most), key=total.__getitem__)
        found[pack].append(item)
        total[pack] += float(weights[item])
    return found


def _grown(loads: Loads, num_replicas: int) -> tuple[Integers, Integers]:
    """(expert of each replica: first one of each, then the further ones as they were made; replicas per expert)."""
    number = np.ones(len(loads), dtype=np.int64)
    holds = list(range(len(loads)))
    for _ in range(num_replicas - len(loads)):
        busiest = int(np.argmax(loads / number))
        holds.append(busiest)
        number[busiest] += 1
    return np.array(holds), number


def _replicas(loads: Loads, num_replicas: int, most: int) -> Integers:
    """Replicas per expert, at most so many of one."""
    number = np.ones(len(loads), dtype=np.int64)
    share = loads.copy()
    for _ in range(num_replicas - len(loads)):
        busiest = int(np.argmax(share))
        if share[busiest] <= 0:
            break
        number[busiest] += 1
        share[busiest] = loads[busiest] / number[busiest] if number[busiest] < most else 0.0
    return number
