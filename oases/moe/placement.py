"""Expert placement: replicas of busy experts, and the device that computes each device's tokens.

A placement is a pure function of the loads, so all ranks find the same one without communication. Sources:
Pro-Prophet (arXiv 2411.10003), lightweight expert placement. There a device with a replica computes its own tokens
for the expert and all others go to the owner; here they may go to any replica, which needs fewer of them. FasterMoE
(PPoPP 2022): shadowing, as described in Pro-Prophet's evaluation. DeepSeek's EPLB: csrc/experts_search.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from oases.errors import UsageError
from oases.extension import place_experts, search_experts
from oases.moe.costs import Costs, native_costs

Integers = NDArray[np.int64]
Copies = tuple[tuple[int, ...], ...]
"""Devices that hold a replica of each expert, besides its owner, in ascending order."""
Chosen = tuple[Integers, Sequence[Sequence[int]]]
"""(routes, copies): see `Placement`."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Expert replicas and token routes.

    copies[expert]: devices with a replica besides the owner. routes[expert, device]: device that computes the
    device's tokens for the expert. device_loads[device]: tokens that it computes. predicted_seconds: of the layer,
    forward and backward. method: name of the placement method.
    """

    method: str
    copies: Copies
    routes: Integers
    device_loads: Integers
    predicted_seconds: float

    @property
    def balance_degree(self) -> float:
        """Standard deviation of the devices' loads, in tokens."""
        return float(np.std(self.device_loads))

    @cached_property
    def moved(self) -> tuple[int, ...]:
        """Experts with replicas."""
        return tuple(expert for expert, devices in enumerate(self.copies) if devices)


def plan(
    counts: ArrayLike, costs: Costs, *, method: str = "prophet", memory_budget: float | None = None
) -> Placement:
    """Choose a placement.

    counts[expert, device]: the device's tokens for the expert, integers. costs: of the layer. method: "none",
    "prophet", "faster_moe" (shadowing) or "eplb" (replication like DeepSeek's). memory_budget: bytes of replicas per
    device; None for no limit. UsageError for counts that are not integers of at least 0, for experts that the devices
    do not divide, and for an unknown method.
    """
    require_method(method, memory_budget)
    loads = checked_counts(counts)
    slots = experts = len(loads)
    if memory_budget is not None and costs.expert_bytes:
        slots = int(min(experts, memory_budget // costs.expert_bytes))
    return METHODS[method](loads, costs, slots)


def require_method(method: str, memory_budget: float | None = None, label: str = "") -> None:
    """Raise UsageError for an unknown placement method, or a negative budget; label: what has them, and ": "."""
    if method not in METHODS:
        raise UsageError(f"{label}unknown placement {method!r}; known are {', '.join(METHODS)}")
    if memory_budget is not None and not memory_budget >= 0:
        raise UsageError(f"{label}memory_budget must be at least 0 bytes, got {memory_budget}")


def make_placement(method: str, counts: Integers, costs: Costs, chosen: Chosen) -> Placement:
    """Placement with these routes and copies, and its predicted cost."""
    (routes, copies), native = chosen, native_costs(costs, counts.shape[1])
    return _from_native(method, *place_experts(torch.from_numpy(counts), torch.from_numpy(routes), copies, native))


def owner_ranks(experts: int, devices: int) -> Integers:
    """Owner rank of each expert, [experts]. UsageError where the devices do not divide the experts."""
    if devices < 1 or experts < devices or experts % devices:
        raise UsageError(
            f"{experts} experts do not divide over {devices} devices; give a multiple of {devices} experts, or an "
            "expert-parallel degree that divides them"
        )
    return np.repeat(np.arange(devices), experts // devices)


def owner_only(counts: Integers) -> Chosen:
    """Routes and copies without replicas: every token goes to its expert's owner."""
    experts, devices = counts.shape
    return np.repeat(owner_ranks(experts, devices)[:, None], devices, axis=1), [()] * experts


def checked_counts(counts: ArrayLike) -> Integers:
    """Counts as integers [expert, device]; UsageError for anything else."""
    found: NDArray[Any] = np.asarray(counts)
    if found.ndim != 2 or not found.size:
        raise UsageError(f"counts must be [expert, device], got a shape of {list(found.shape)}")
    if not np.issubdtype(found.dtype, np.integer) and not np.issubdtype(found.dtype, np.floating):
        raise UsageError(f"counts must be whole numbers of tokens, got {found.dtype}")
    with np.errstate(invalid="ignore"):
        whole = np.ascontiguousarray(found, dtype=np.int64)
    if whole.min() < 0 or (whole is not found and (whole != found).any()):
        expert, device = np.argwhere((whole != found) | (whole < 0))[0]
        raise UsageError(
            f"counts[{expert}, {device}] is {found[expert, device]}; tokens are whole numbers of at least 0"
        )
    owner_ranks(*whole.shape)
    return whole


def _from_native(method: str, routes: Any, copies: list[list[int]], tokens: list[float], seconds: float) -> Placement:
    """Placement from the result of csrc/bindings.cpp."""
    loads = np.rint(np.array(tokens)).astype(np.int64)
    return Placement(method, tuple(map(tuple, copies)), routes.numpy(), loads, seconds)


# --- methods: (counts, costs, replicas that a device may hold) -> placement ---


def _none(counts: Integers, costs: Costs, slots: int) -> Placement:
    return make_placement("none", counts, costs, owner_only(counts))


def _prophet(counts: Integers, costs: Costs, slots: int) -> Placement:
    found = search_experts(torch.from_numpy(counts), native_costs(costs, counts.shape[1]), slots)
    return _from_native("prophet", *found)


def _faster_moe(counts: Integers, costs: Costs, slots: int) -> Placement:
    """The heaviest experts are replicated on all devices while the modelled time falls."""
    experts, devices = counts.shape
    home, everyone = owner_ranks(experts, devices), np.arange(devices)
    routes, _ = owner_only(counts)
    copies: list[list[int]] = [[] for _ in range(experts)]
    best = make_placement("faster_moe", counts, costs, (routes, copies))
    held = np.zeros(devices, dtype=np.int64)
    for expert in np.argsort(-counts.sum(1), kind="stable").tolist():
        others = everyone[everyone != home[expert]]
        held[others] += 1
        if devices == 1 or held.max() > slots:
            break
        routes[expert], copies[expert] = everyone, others.tolist()
        after = make_placement("faster_moe", counts, costs, (routes, copies))
        if after.predicted_seconds >= best.predicted_seconds:
            break
        best = after
    return best


def _eplb(counts: Integers, costs: Costs, slots: int) -> Placement:
    native = native_costs(costs, counts.shape[1])
    routes, copies, *_ = search_experts(torch.from_numpy(counts), native, slots, eplb=True)
    return make_placement("eplb", counts, costs, (routes.numpy(), copies))


METHODS: dict[str, Callable[[Integers, Costs, int], Placement]] = {
    "none": _none, "prophet": _prophet, "faster_moe": _faster_moe, "eplb": _eplb,
}  # fmt: skip
