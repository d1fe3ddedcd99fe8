"""Placement: the devices that hold replicas of an expert, and the device that computes each device's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oases.errors import UsageError
from oases.moe.costs import Costs

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


def make_placement(method: str, counts: Integers, costs: Costs, chosen: Chosen) -> Placement:
    """Placement with these routes and copies, and its predicted cost."""
    import torch

    from oases.extension import place_experts

    routes, copies = chosen
    found = place_experts(torch.from_numpy(counts), torch.from_numpy(routes), copies, costs.native(counts.shape[1]))
    return placement_from_native(method, *found)


def placement_from_native(
    method: str, routes: Any, copies: list[list[int]], tokens: list[float], seconds: float
) -> Placement:
    """Placement from the result of csrc/bindings.cpp."""
    loads = np.rint(np.array(tokens)).astype(np.int64)
    return Placement(method, tuple(map(tuple, copies)), routes.numpy(), loads, seconds)


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
