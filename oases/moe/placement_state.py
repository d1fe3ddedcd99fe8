"""State of a layer's placement and router bias across training steps."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.dispatch import ExpertCounts
from oases.moe.forecast import Planner
from oases.moe.placement import Integers, Placement, owner_only, owner_ranks
from oases.moe.recomputation import ForwardPass, OpenPasses, RoutingState
from oases.moe.router import Router, Routing


@dataclass(frozen=True)
class MoEStatistics:
    """Statistics of a layer's last forward pass, in slots ((token, expert) pairs).

    counts[expert, device]: slots sent. device_loads: slots computed by each device. balance_degree: their standard
    deviation; balance_degree_at_home: the same without replicas. dropped: by the capacity, on all ranks. token_bytes,
    expert_bytes: bytes that this rank sent to others in the forward pass. balance_loss, z_loss: this rank's values,
    None where the layer has no such loss.
    """

    counts: Integers
    placement: Placement
    device_loads: Integers
    balance_degree: float
    balance_degree_at_home: float
    dropped: int
    token_bytes: int
    expert_bytes: int
    balance_loss: Tensor | None
    z_loss: Tensor | None


def statistics_of(
    demand: ExpertCounts, placement: Placement, routing: Routing, token_bytes: int, expert_bytes: int
) -> MoEStatistics:
    """Statistics of a forward pass."""
    counts = demand.counts
    devices = counts.shape[1]
    loads = np.bincount(placement.routes.ravel(), counts.ravel(), devices).astype(np.int64)
    at_home = counts.reshape(devices, -1).sum(1)
    return MoEStatistics(
        counts, placement, loads, float(np.std(loads)), float(np.std(at_home)), demand.dropped, token_bytes,
        expert_bytes, routing.balance_loss, routing.z_loss,
    )  # fmt: skip


def numbered(name: str, group: ProcessGroup | None) -> str:
    """Name of a new layer with its number among those made for the group, since names are often equal."""
    return name if group is None else f"{name} {next(_numbers.setdefault(group, itertools.count()))}"


_numbers: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class PlacementState:
    """Placement state of one layer; equal on all ranks, because computed from the same counts.

    method: placement method. costs: None where they are yet to be measured. layer: what tells the layer from others
    of the same ranks, equal on all of them.
    """

    def __init__(
        self,
        experts: int,
        devices: int,
        method: str,
        costs: Costs | None,
        memory_budget: float | None,
        layer: str,
    ) -> None:
        self._layer = layer
        self.method, self.costs = method, costs
        self.passes = OpenPasses()
        self.number = 0
        """Number of training passes."""
        self._experts, self._devices = experts, devices
        self._memory_budget = memory_budget
        counts = np.zeros((experts, devices), dtype=np.int64)
        routes, copies = owner_only(counts)
        plain = Placement("none", tuple(tuple(held) for held in copies), routes, counts.sum(0), 0.0)
        self._plain = plain
        self._planner: Planner | None = None
        self._current = self._next = plain
        self._fixed: Placement | None = None
        self._setting: RoutingState | None = None
        self._version: tuple[object, ...] = ()

    @property
    def _plans(self) -> bool:
        return self.method != "none" and self._devices > 1 and self._fixed is None

    @property
    def needs_costs(self) -> bool:
        """Whether costs must be measured now."""
        return self.costs is None and self._plans

    def fix(self, placement: Placement | None) -> None:
        """Fix the placement; None: use the planner's. UsageError for one that does not fit the layer."""
        if placement is not None:
            self._check(placement)
        self._fixed = placement

    def setting(self, router: Router | None) -> RoutingState:
        """Routing state of a pass that begins now; the same object until it changes."""
        placement = self._fixed or self._current
        # load_state_dict also changes the bias.
        bias = None if router is None else router.bias
        version = (placement, None if bias is None else (id(bias), bias._version))
        if self._setting is None or self._version != version:
            self._setting = RoutingState(placement, None if bias is None else bias.clone())
            self._version = version
        return self._setting

    def state(self, settings: list[RoutingState], *, training: bool, order: int = 0) -> int:
        """Digest of what must be equal on every rank, 62 bits: layer, mode, number of training passes, placements.

        order: hash of the schedule that the call is an op of.
        """
        digest = hashlib.blake2b(f"{self._layer}\n{training}\n{self.number}\n{order}".encode(), digest_size=8)
        for setting in settings:
            digest.update(repr(setting.placement.copies).encode() + setting.placement.routes.tobytes())
        return int.from_bytes(digest.digest(), "big") >> 2

    def begin(self, router: Router | None, load_group: ProcessGroup | None) -> None:
        """Update placement and bias at the start of a training pass, if no pass is open."""
        if self.passes.all_closed():
            self._current = self._next
            if router is not None:
                router.update_bias(load_group)

    def open(self, setting: RoutingState) -> ForwardPass:
        """Open a training pass, which all ranks do."""
        self.number += 1
        return self.passes.open(setting)

    def observe(self, counts: Integers) -> None:
        """Add counts [expert, device] of a training pass; plans the next step's placement."""
        if not self._plans or self.costs is None:
            return
        if self._planner is None:
            self._planner = Planner(self.costs, self.method, self._memory_budget)
        self._next = self._planner.next(counts)

    def _check(self, placement: Placement) -> None:
        shape = (self._experts, self._devices)
        if placement.routes.shape != shape or len(placement.copies) != self._experts:
            raise UsageError(
                f"a placement with routes {list(placement.routes.shape)} and {len(placement.copies)} copies does not "
                f"fit {self._experts} experts on {self._devices} devices"
            )
        for expert, home in enumerate(owner_ranks(*shape).tolist()):
            copies, routes = placement.copies[expert], placement.routes[expert].tolist()
            if list(copies) != sorted({*copies} - {home}) or not {*copies} <= {*range(self._devices)}:
                raise UsageError(
                    f"expert {expert} has copies on {copies}; give other devices than its owner {home}, ascending"
                )
            strays = {*routes} - {home, *copies}
            if strays:
                raise UsageError(
                    f"tokens for expert {expert} are routed to device {min(strays)}, which does not hold it; route "
                    f"them to {sorted({home, *copies})}"
                )
