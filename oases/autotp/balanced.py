"""Balanced experts of unedited models: tokens are sent to the experts, and busy experts copied where that saves time.

Routing stays the model's own code, which every tensor-parallel rank runs on the same tokens. Each rank then sends its
share of them to the experts' ranks and back, and returns a partial sum of the layer: the results of its own tokens,
zeros for the others. So the layer is cut as with experts that are summed, and its all-reduce joins the shares.

A placement changes where an expert is computed and never a result, so it may change between any two calls. It follows
from counts that all ranks gather, in the order of the calls, which is equal on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.experts import ExpertMlp
from oases.core.execution.communication import WireType
from oases.core.execution.failure import FailTogether, monitor_of
from oases.core.execution.group import ProcessGroup, group_of, group_size
from oases.distributed.expert_groups import ExpertGroups, expert_groups
from oases.distributed.mesh import Mesh
from oases.distributed.replicas import DATA_DIMENSIONS
from oases.errors import UsageError
from oases.kernels.permute import histogram
from oases.moe.cost_measurement import measure_costs
from oases.moe.costs import Costs
from oases.moe.dispatch import ExpertCounts, RoutingError, shard_bounds, start_counts
from oases.moe.experts import ExpertWeights
from oases.moe.forward import ExpertForward
from oases.moe.gradients import with_gradients
from oases.moe.placement import require_method
from oases.moe.router import Routing
from oases.moe.state import PlacementState, is_recomputation

_STATE = "_oases_balanced"
"""Attribute of an expert module that holds its `BalancedExperts`; private, so that a layer looks the same with it."""


BalancedMlp = tuple[ExpertMlp, int]
"""Function of an expert module, and its number of experts."""


@dataclass(frozen=True)
class ExpertOptions:
    """Options of balanced experts. groups: of this rank. placement, wire: as in `OverlappedMoE`."""

    groups: ExpertGroups
    placement: str = "prophet"
    wire: WireType | None = None


@dataclass
class BalancedExperts:
    """State of one expert module. module: the model's own. mlp: its function. number: of all experts.

    tensor: name of the tensor-parallel group. wire: type in which tokens are sent. known: measured costs by sizes,
    shared by the modules of a model. counts: of the last call, [expert, device].
    """

    name: str
    module: nn.Module
    mlp: ExpertMlp
    number: int
    groups: ExpertGroups
    tensor: str
    placing: PlacementState
    known: dict[Any, Costs]
    wire: WireType | None
    counts: Any = field(default=None, repr=False)

    def together(self) -> FailTogether:
        """Context in which an exception is raised on every rank of the experts' group."""
        return FailTogether(monitor_of(group_of(self.groups.expert)), self.name, unanimous=(RoutingError,))


class TokenExchange:
    """One call of balanced experts.

    order: hash of the schedule that runs its pieces as ops, which the ranks compare before the first all-to-all.
    forward: the forward pass of this rank's share of the tokens, from `begin` on.
    """

    forward: ExpertForward

    def __init__(self, state: BalancedExperts, order: int = 0) -> None:
        self.state, self._order = state, order
        self._learned: ExpertCounts | None = None

    def begin(
        self, x: Tensor, index: Tensor, weights: Tensor, given: Sequence[Tensor]
    ) -> tuple[Tensor, Routing, ExpertWeights]:
        """This rank's share of the tokens, its routing, and the rank's experts."""
        state, placing, group = self.state, self.state.placing, group_of(self.state.groups.expert)
        kind, self._tokens, self._result = x.device.type, len(x), x.dtype
        first, last = self._bounds = shard_bounds(len(x), group_of(state.tensor))
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x, index, weights, self._dtype = x[first:last].to(dtype), index[first:last], weights[first:last], dtype
        own = self.experts(given)
        learns = state.module.training and not is_recomputation()
        if learns and placing.needs_costs and group is not None:
            placing.costs = measure_costs(
                own, index.numel() // state.number, state.mlp.run, group, state.name, hidden=x.shape[1],
                wire=state.wire, known=state.known,
            )  # fmt: skip
        if learns:
            placing.begin(None, None)
        sent = histogram(index, state.number, check=False)
        faulty = ((index < 0) | (index >= state.number)).any()
        routing = Routing(index, weights, sent, sent, None, None, None, faulty)
        setting = placing.setting(None)
        digest = placing.state([setting], training=state.module.training, order=self._order)
        (demand,) = start_counts([routing], group, state=digest, label=state.name)()
        placing.number += learns
        self._learned = demand if learns else None
        run, counts = state.mlp.run, demand.counts
        self.forward = ExpertForward(run, group, counts, setting.placement, x.device, state.name, state.wire)
        return x, routing, own

    def sent(self) -> None:
        """While the rows travel: plan the next call's placement."""
        if self._learned is not None:
            self.state.counts = self._learned.counts
            self.state.placing.observe(self._learned.counts)
            self._learned = None

    def padded(self, y: Tensor) -> Tensor:
        """Weighted sums of this rank's share -> of all tokens, with zeros for the other ranks' shares."""
        first, last = self._bounds
        return F.pad(y, (0, 0, first, self._tokens - last)).to(self._result)

    def experts(self, given: Sequence[Tensor]) -> ExpertWeights:
        """This rank's experts as they are run: in the type of the tokens, with scaled gradients."""
        scale = self.state.groups.scale
        if scale != 1:
            given = [with_gradients(lambda grad: [grad * scale], each)[0] for each in given]
        return self.state.mlp.weights([each.to(self._dtype) for each in given])


def balanced_experts(state: BalancedExperts, x: Tensor, index: Tensor, weights: Tensor, *given: Tensor) -> Tensor:
    """Partial sum [T, hidden] of the tokens x, with the experts index [T, k] and their weights [T, k], in a graph.

    given: this rank's experts. All ranks of the group call it at once; tokens may differ in number.
    """
    with state.together():
        call = TokenExchange(state)
        tokens, routing, own = call.begin(x, index, weights, given)
        y, _ = call.forward.through(tokens, routing, own, call.sent)
        return call.padded(y)


def state_of(module: nn.Module) -> BalancedExperts:
    """State of a balanced expert module."""
    found: BalancedExperts = vars(module)[_STATE]
    return found


def attach_states(model: nn.Module, found: dict[str, BalancedMlp], options: ExpertOptions, tensor: str) -> None:
    """Give the expert modules of a model, by name, their state; those that have one keep it."""
    known: dict[Any, Costs] = {}
    groups = options.groups
    for name, (mlp, number) in found.items():
        module = model.get_submodule(name)
        if _STATE not in vars(module):
            placing = PlacementState(number, groups.degree, options.placement, None, None, f"{name} {options.wire}")
            state = BalancedExperts(name, module, mlp, number, groups, tensor, placing, known, options.wire)
            object.__setattr__(module, _STATE, state)


def require_balanced(twin: nn.Module, collections: dict[str, Any]) -> None:
    """Raise UsageError, naming modules, for a model whose experts cannot be balanced."""
    kind = type(twin).__name__
    drops = [name for name, module in twin.named_modules() if any("capacity" in key for key in vars(module))]
    if drops:
        raise UsageError(
            f"experts='balanced': {drops[0]} of {kind} drops tokens over a capacity, which depends on all tokens of "
            "a call; leave experts out, and train it with replicated experts"
        )
    if not collections:
        raise UsageError(
            f"experts='balanced': {kind} has no expert module with stacked weights [E, ...] that is called with "
            "tokens, their experts and weights; leave experts out"
        )
    for name, known in collections.items():
        if known.whole:
            fits = ", ".join(str(n) for n in range(1, known.number + 1) if known.number % n == 0)
            remedy = "leave experts out" if known.mlp is None else f"give expert_parallel one of {fits}"
            raise UsageError(f"experts='balanced': {name} of {kind}: {known.whole}; {remedy}")


def expert_options(
    mesh: Any, stage: Mesh | None, group: ProcessGroup | None, degree: int | None, placement: str,
    wire: WireType | None, *, sharded: bool = False,
) -> ExpertOptions:  # fmt: skip
    """Options of balanced experts of a mesh. Collective: creates the groups.

    stage: the mesh of this rank's stage, where there are stages. group: tensor-parallel ranks. sharded: with fsdp or
    zero over the replicas of a stage. UsageError for an unknown placement and a degree that does not fit.
    """
    require_method(placement)
    if stage is not None:
        stages = [stage.members_of(number) for number in range(stage.num_stages)]
    elif isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        names = mesh.mesh_dim_names or ()
        known = [at for at, name in enumerate(names) if name in DATA_DIMENSIONS]
        known += [at for at, name in enumerate(names) if name == "tp"]
        others = [at for at in range(mesh.ndim) if at not in known]
        if others:
            raise UsageError(f"experts='balanced' over a mesh with the dimensions {names}; give dp and tp alone")
        stages = [mesh.mesh.permute(known).flatten().tolist()]
    else:
        stages = [[0] if group is None else dist.get_process_group_ranks(group)]
    return ExpertOptions(expert_groups(stages, group_size(group), degree, sharded=sharded), placement, wire)
