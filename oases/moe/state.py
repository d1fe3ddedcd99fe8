"""State of a layer across its forward passes: placement, router bias, and the passes that are still open.

Router bias and placement change from step to step. Recomputation in the backward pass must not see new ones: it would
send tokens elsewhere. Both therefore stay while a forward pass is open, that is, until its backward pass or that of a
later one has begun: they change at the first forward pass of a training step, for any number of micro-batches.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from oases.core.execution import failure
from oases.core.execution.call import refuse_second_derivatives
from oases.core.execution.failure import FailureMonitor, monitor_of, watch_backward
from oases.core.execution.group import ProcessGroup, group_of
from oases.errors import UsageError
from oases.moe.costs import Costs
from oases.moe.dispatch import RoutingError
from oases.moe.forecast import Planner
from oases.moe.gradients import with_gradients
from oases.moe.placement import Integers, Placement, owner_only, owner_ranks
from oases.moe.router import Router

MOST_OPEN = 64
"""Maximum number of open passes; beyond it the oldest are assumed to have no backward pass."""


def is_recomputation() -> bool:
    """Whether the current call is a recomputation in a backward pass, as by torch.utils.checkpoint."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, eq=False)
class RoutingState:
    """State that may change between steps. bias: a copy of the router's, None where it has none."""

    placement: Placement
    bias: Tensor | None


@dataclass(eq=False)
class ForwardPass:
    """Training pass. counts: [expert, device], once known. done: completed."""

    setting: RoutingState
    counts: Integers | None = None
    done: bool = False
    closed: bool = False


class OpenPasses:
    """Open passes of one layer."""

    def __init__(self) -> None:
        self._open: list[ForwardPass] = []

    def all_closed(self) -> bool:
        """Whether the state may change, asked before a pass is opened.

        Equal on every rank, unless one has failed: it follows from the order of calls alone.
        """
        # Backward passes come in the order of the forward passes, or all before the next one. So a pass before one
        # that is closed has no backward pass, as a forward pass to warm up, or of a step that was skipped.
        closed = max((number for number, each in enumerate(self._open) if each.closed), default=-1)
        self._open = [each for each in self._open[closed + 1 :] if each.done]
        if len(self._open) < MOST_OPEN:
            return not self._open
        del self._open[0]
        return True

    def open(self, setting: RoutingState) -> ForwardPass:
        """Begin a forward pass."""
        self._open.append(ForwardPass(setting))
        return self._open[-1]

    def newest(self) -> ForwardPass | None:
        """Last pass whose backward pass has not begun, where a recomputation does not know its counts yet."""
        return next((each for each in reversed(self._open) if each.done and not each.closed), None)

    def settings(self) -> list[RoutingState]:
        """Distinct states of the open passes, one of which a recomputation has; nearly always one."""
        found: list[RoutingState] = []
        for each in self._open:
            if each.counts is not None and each.setting not in found:
                found.append(each.setting)
        return found

    def find(self, settings: list[RoutingState], candidates: list[Integers], label: str) -> tuple[int, ForwardPass]:
        """Find the pass that is recomputed: (index of its state, pass). candidates: counts under each state.

        RoutingError where none had such counts.
        """
        for each in sorted(self._open, key=lambda each: each.closed):  # of two equal passes each is found once
            if each.counts is not None:
                index = settings.index(each.setting)
                if np.array_equal(each.counts, candidates[index]):
                    return index, each
        raise RoutingError(
            f"{label}: a recomputation sends tokens to other experts than its forward pass did. Layers before "
            "the router must be deterministic: keep the random state (preserve_rng_state=True), and use "
            "deterministic kernels"
        )


@dataclass(eq=False)
class PlacementState:
    """Placement state of one layer; equal on all ranks, because computed from the same counts.

    method: placement method. costs: None where they are yet to be measured. layer: what tells the layer from others
    of the same ranks, equal on all of them. number: of training passes.
    """

    experts: int
    devices: int
    method: str
    costs: Costs | None
    memory_budget: float | None
    layer: str
    number: int = 0
    passes: OpenPasses = field(default_factory=OpenPasses)
    _planner: Planner | None = None
    _fixed: Placement | None = None
    _setting: RoutingState | None = None
    _version: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        counts = np.zeros((self.experts, self.devices), dtype=np.int64)
        routes, copies = owner_only(counts)
        self._current = self._next = Placement("none", tuple(map(tuple, copies)), routes, counts.sum(0), 0.0)

    @property
    def _plans(self) -> bool:
        return self.method != "none" and self.devices > 1 and self._fixed is None

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
        digest = hashlib.blake2b(f"{self.layer}\n{training}\n{self.number}\n{order}".encode(), digest_size=8)
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
            self._planner = Planner(self.costs, self.method, self.memory_budget)
        self._next = self._planner.next(counts)

    def _check(self, placement: Placement) -> None:
        shape = (self.experts, self.devices)
        if placement.routes.shape != shape or len(placement.copies) != self.experts:
            raise UsageError(
                f"a placement with routes {list(placement.routes.shape)} and {len(placement.copies)} copies does not "
                f"fit {self.experts} experts on {self.devices} devices"
            )
        for expert, home in enumerate(owner_ranks(*shape).tolist()):
            copies, routes = placement.copies[expert], placement.routes[expert].tolist()
            if list(copies) != sorted({*copies} - {home}) or not {*copies} <= {*range(self.devices)}:
                raise UsageError(
                    f"expert {expert} has copies on {copies}; give other devices than its owner {home}, ascending"
                )
            strays = {*routes} - {home, *copies}
            if strays:
                raise UsageError(
                    f"tokens for expert {expert} are routed to device {min(strays)}, which does not hold it; route "
                    f"them to {sorted({home, *copies})}"
                )


@dataclass(frozen=True)
class MoEStatistics:
    """Statistics of a layer's last forward pass, in slots ((token, expert) pairs).

    counts[expert, device]: slots sent. dropped: by the capacity, on all ranks. token_bytes, expert_bytes: bytes that
    this rank sent to others in the forward pass. balance_loss, z_loss: this rank's values, None where the layer has
    no such loss.
    """

    counts: Integers
    placement: Placement
    dropped: int
    token_bytes: int
    expert_bytes: int
    balance_loss: Tensor | None
    z_loss: Tensor | None

    @property
    def device_loads(self) -> Integers:
        """Slots computed by each device."""
        return np.bincount(self.placement.routes.ravel(), self.counts.ravel(), self.counts.shape[1]).astype(np.int64)

    @property
    def balance_degree(self) -> float:
        """Standard deviation of the devices' loads."""
        return float(np.std(self.device_loads))

    @property
    def balance_degree_at_home(self) -> float:
        """The same without replicas."""
        return float(np.std(self.counts.reshape(self.counts.shape[1], -1).sum(1)))


def numbered(name: str, group: ProcessGroup | None) -> str:
    """Name of a new layer with its number among those made for the group, since names are often equal."""
    return name if group is None else f"{name} {next(_numbers.setdefault(group, itertools.count()))}"


_numbers: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def begin_call(group: ProcessGroup | None, label: str, x: Tensor, *, training: bool) -> FailureMonitor | None:
    """Begin a call of a layer or stack; return the failure monitor, None for one rank.

    UsageError or FailedRankError, on all ranks, where their calls differ in more than the number of tokens.
    """
    monitor = monitor_of(group)
    if monitor is None:
        return None
    monitor.check()
    if not is_recomputation():  # under activation checkpointing its mode is another than that of the forward pass
        gradients = torch.is_grad_enabled()
        form = (
            "type of the input", x.dtype, "computation of gradients", gradients, "training mode", training,
            "gradient of the input", gradients and x.requires_grad,
        )  # fmt: skip
        failure.begin_call(group, label, form)
    return monitor


def closing(x: Tensor, each: ForwardPass | None, label: str, group: str) -> Tensor:
    """`x`, the output of the layer `label`; its one backward pass closes the training pass `each`.

    group: c10d name of the group whose ranks are told where that pass fails.
    """
    runs = [0]

    def begin(grad: Tensor) -> list[Tensor]:
        refuse_second_derivatives(label)
        if runs[0]:
            raise RuntimeError(
                f"the backward pass of this call of {label} has run already; call the layer again for a second "
                "backward pass"
            )
        runs[0] = 1
        watch_backward(monitor_of(group_of(group)), label)
        if each is not None:
            each.closed = True
        return [grad]

    return with_gradients(begin, x)[0]
