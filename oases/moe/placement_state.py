"""How a layer's placement and its router's bias go from one training step to the next."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from oases.errors import UsageError
from oases.execution.group import ProcessGroup
from oases.moe.costs import Costs
from oases.moe.forecast import Planner
from oases.moe.placement_data import Integers, Placement, owner_only, owner_ranks
from oases.moe.recomputation import ForwardPass, OpenPasses, RoutingState
from oases.moe.router import Router

METHODS = ("none", "prophet", "faster_moe", "eplb", "optimum")


@dataclass(frozen=True)
class MoEStatistics:
    """What a layer's last forward pass did; numbers of slots (pairs of a token and one of its experts).

    counts[expert, device]: what was sent. device_loads: what each device computed. balance_degree: their standard
    deviation; balance_degree_at_home: what it were without copies. dropped: by the capacity, on all ranks.
    token_bytes, expert_bytes: that this rank sent to others in the forward pass. balance_loss, z_loss: this rank's
    values, None where the layer has no such loss.
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


class PlacementState:
    """Of one layer. Every rank has the same, from the same counts.

    method: a placement's. costs: None where they are yet to be measured.
    """

    def __init__(
        self, experts: int, devices: int, method: str, costs: Costs | None, memory_budget: float | None
    ) -> None:
        self.method, self.costs = method, costs
        self.passes = OpenPasses()
        self.number = 0
        """Forward passes in training."""
        self._experts, self._devices = experts, devices
        self._memory_budget = memory_budget
        counts = np.zeros((experts, devices), dtype=np.int64)
        routes, copies = owner_only(counts)
        plain = Placement("none", tuple(tuple(held) for held in copies), routes, counts.sum(0), 0.0)
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
        """Whether costs are to be measured now."""
        return self.costs is None and self._plans

    def fix(self, placement: Placement | None) -> None:
        """Always this placement; None: the planner's. UsageError for one that does not fit the layer."""
        if placement is not None:
            self._check(placement)
        self._fixed = placement

    def setting(self, router: Router) -> RoutingState:
        """Of a pass that begins now. It stays the same object until it changes."""
        placement = self._fixed or self._current
        # A bias may be changed from outside, too: by load_state_dict.
        bias = router.bias
        version = (placement, None if bias is None else (id(bias), bias._version))
        if self._setting is None or self._version != version:
            self._setting = RoutingState(placement, None if bias is None else bias.clone())
            self._version = version
        return self._setting

    def state(self, settings: list[RoutingState]) -> int:
        """What has to be the same on every rank, in 62 bits."""
        found = self.number & 0x3FFFFFFF
        for setting in settings:
            placement = setting.placement
            found = (found << 32 | zlib.crc32(repr(placement.copies).encode() + placement.routes.tobytes())) % (
                1 << 62
            )
        return found

    def begin(self, router: Router, load_group: ProcessGroup | None) -> None:
        """A forward pass in training: the placement and the bias change, if no pass is open."""
        if self.passes.all_closed():
            self._current = self._next
            router.update_bias(load_group)

    def open(self, setting: RoutingState) -> ForwardPass:
        """A pass in training of which all ranks know."""
        self.number += 1
        return self.passes.open(setting)

    def observe(self, counts: Integers) -> None:
        """Counts [expert, device] of a forward pass in training; plans the next step's placement."""
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
                    f"expert {expert} has copies on {copies}; give others than its home {home}, in rising order"
                )
            strays = {*routes} - {home, *copies}
            if strays:
                raise UsageError(
                    f"tokens for expert {expert} are routed to device {min(strays)}, which does not hold it; route "
                    f"them to {sorted({home, *copies})}"
                )
