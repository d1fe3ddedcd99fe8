"""Expert placement: replicas of busy experts, and the device that computes each device's tokens.

A placement is a pure function of the loads, so all ranks find the same one without communication. Source: Pro-Prophet
(arXiv 2411.10003), lightweight expert placement. There a device with a replica computes its own tokens for the expert
and all others go to the owner; here they may go to any replica, which needs fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable

from numpy.typing import ArrayLike

from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.eplb import eplb_placement
from oases.moe.placement_data import (
    Chosen,
    Integers,
    Placement,
    checked_counts,
    make_placement,
    owner_only,
    owner_ranks,
    placement_from_native,
)
from oases.moe.shadowing import shadowing_placement

__all__ = ["Chosen", "Integers", "Placement", "checked_counts", "make_placement", "owner_only", "owner_ranks", "plan"]


def plan(
    counts: ArrayLike, costs: Costs, *, method: str = "prophet", memory_budget: float | None = None
) -> Placement:
    """Choose a placement.

    counts[expert, device]: the device's tokens for the expert, integers. costs: of the layer. method: "none",
    "prophet", "faster_moe" (shadowing) or "eplb" (replication like DeepSeek's). memory_budget: bytes of replicas per
    device; None for no limit. UsageError for counts that are not integers of at least 0, for experts that the devices
    do not divide, and for an unknown method.
    """
    methods = _methods()
    if method not in methods:
        raise UsageError(f"unknown placement {method!r}; known are {', '.join(methods)}")
    loads = checked_counts(counts)
    slots = _slots(memory_budget, costs, len(loads))
    return methods[method](loads, costs, slots)


def _slots(memory_budget: float | None, costs: Costs, experts: int) -> int:
    if memory_budget is None or (costs.expert_bytes == 0 and memory_budget >= 0):
        return experts
    if not memory_budget >= 0:
        raise UsageError(f"memory_budget must be at least 0 bytes, got {memory_budget}")
    return int(min(experts, memory_budget // costs.expert_bytes))


def _searched(counts: Integers, costs: Costs, slots: int) -> Placement:
    import torch

    from oases.extension import search_experts

    return placement_from_native(
        "prophet", *search_experts(torch.from_numpy(counts), costs.native(counts.shape[1]), slots)
    )


Method = Callable[[Integers, Costs, int], Placement]
"""(counts, costs, replicas that a device may hold) -> placement."""


def _methods() -> dict[str, Method]:
    def of(name: str, choose: Callable[[Integers, Costs, int], Chosen]) -> Method:
        return lambda counts, costs, slots: make_placement(name, counts, costs, choose(counts, costs, slots))

    return {
        "none": of("none", lambda counts, costs, slots: owner_only(counts)),
        "prophet": _searched,
        "faster_moe": of("faster_moe", shadowing_placement),
        "eplb": of("eplb", eplb_placement),
    }
