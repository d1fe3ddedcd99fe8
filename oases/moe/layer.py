"""OverlappedMoE: expert-parallel mixture of experts with load-balanced placement.

Results are those of plain expert parallelism for every placement. A forward pass routes tokens (`Router`), gathers
the counts of all ranks (`start_counts`) and runs `ExpertForward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from oases.core.blocks.sharding import Cut
from oases.core.execution.communication import WireType, wire_type
from oases.core.execution.failure import FailsTogether, FailTogether, refuse_capture
from oases.core.execution.group import (
    ProcessGroup,
    group_name,
    group_of,
    group_size,
    resolve,
)
from oases.distributed.collectives import broadcast_shares, gather, scatter
from oases.errors import UsageError
from oases.moe.cost_measurement import measure_costs
from oases.moe.costs import Costs
from oases.moe.dispatch import ExpertCounts, RoutingError, shard_bounds, start_counts
from oases.moe.experts import Experts, ExpertWeights, SharedExpert, compute, middle_of
from oases.moe.forward import ExpertForward
from oases.moe.gradients import sum_gradients, total
from oases.moe.placement import Placement, require_method
from oases.moe.router import Gate, Router, Routing
from oases.moe.state import (
    ForwardPass,
    MoEStatistics,
    PlacementState,
    RoutingState,
    begin_call,
    closing,
    is_recomputation,
    numbered,
)


class OverlappedMoE(FailsTogether, nn.Module):
    """Mixture of experts: weighted sum of `top_k` of `num_experts` per token; [..., hidden] -> the same shape.

    process_group: expert-parallel ranks, each with its own tokens; None for the default group. placement: "none"
    (plain expert parallelism), "prophet", "faster_moe" or "eplb": method that chooses each step's replicas of busy
    experts from the loads of earlier steps. costs: cost model of the placement; None measures it at the first
    training step. memory_budget: bytes of replicas per device. gated, bias: of the experts' MLPs.
    shared_intermediate: above 0, width of a shared expert, computed during the dispatch; shared_gate: with a sigmoid
    gate. gate, normalised (None: where top_k is above 1), scale, balance_weight, z_weight, bias_update_rate,
    capacity_factor: see `Router`. load_group: ranks whose load moves the router's bias, where the whole group is
    replicated; default: process_group. tensor_group: tensor-parallel ranks, with equal inputs and outputs; each
    computes a share of the tokens. All of them are in process_group, or this rank alone is. wire_dtype: type in which
    tokens and their gradients are sent, see `oases.core.dtypes`. device, dtype: of the parameters.

    Replicated parameters (router, shared expert) are broadcast at the start, and their gradients are local: average
    them over the ranks, as for any data parallelism. An expert's gradient at its owner is the sum over all tokens of
    the group; in a mean over the ranks' losses its weight is 1 / ranks. Placement and router bias change between
    training steps: see `oases.moe.state`. UsageError for invalid arguments; RoutingError, on all ranks, for gates
    that are not finite.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        *,
        top_k: int = 2,
        process_group: ProcessGroup | None = None,
        placement: str = "prophet",
        gated: bool = False,
        bias: bool = False,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        gate: Gate = "softmax",
        normalised: bool | None = None,
        scale: float = 1.0,
        balance_weight: float = 0.0,
        z_weight: float = 0.0,
        bias_update_rate: float = 0.0,
        capacity_factor: float | None = None,
        costs: Costs | None = None,
        memory_budget: float | None = None,
        load_group: ProcessGroup | None = None,
        tensor_group: ProcessGroup | None = None,
        wire_dtype: WireType | None = None,
        name: str = "MoE layer",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_method(placement, memory_budget, f"{name}: ")
        if shared_intermediate < 0:
            raise UsageError(f"{name}: shared_intermediate must be at least 0, got {shared_intermediate}")
        self.hidden, self.name, self.wire_dtype = hidden, name, wire_type(wire_dtype)
        self.process_group = group = resolve(process_group)
        self._load_group = group_name(load_group if load_group is not None else group)
        self._tensor_group = group_name(tensor_group)
        self._experts_are_shared = _share_experts(tensor_group, group, name)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = Router(
            hidden, num_experts, top_k=top_k, gate=gate, normalised=top_k > 1 if normalised is None else normalised,
            scale=scale, balance_weight=balance_weight, z_weight=z_weight, bias_update_rate=bias_update_rate,
            capacity_factor=capacity_factor, **options,
        )  # fmt: skip
        self.experts = Experts(
            hidden, intermediate, num_experts, gated=gated, bias=bias, process_group=group, **options
        )
        self.shared = (
            SharedExpert(hidden, shared_intermediate, gated=gated, bias=bias, scaled=shared_gate, **options)
            if shared_intermediate
            else None
        )
        key = f"{numbered(name, group)} {self.wire_dtype}"
        self._placement_state = PlacementState(num_experts, group_size(group), placement, costs, memory_budget, key)
        self.last: MoEStatistics | None = None
        """Statistics of the last forward pass, recomputations excluded."""
        if group_size(group) > 1 and not self.router.weight.is_meta:
            replicated = [module for module in (self.router, self.shared) if module is not None]
            broadcast_shares([[each for module in replicated for each in module.parameters()]], group)

    @property
    def placement(self) -> str:
        """Placement method."""
        return self._placement_state.method

    @property
    def costs(self) -> Costs | None:
        """Cost model; None until it is measured. Set it to the same value on every rank."""
        return self._placement_state.costs

    @costs.setter
    def costs(self, costs: Costs) -> None:
        self._placement_state.costs = costs

    @property
    def needs_costs(self) -> bool:
        """Whether costs are yet to be measured."""
        return self._placement_state.needs_costs

    def place(self, placement: Placement | None) -> None:
        """Fix the placement of later forward passes, the same on every rank; None: choose it again.

        UsageError where tokens are routed to a device that does not hold their expert.
        """
        self._placement_state.fix(placement)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden], any number of tokens, also 0 -> the same shape."""
        refuse_capture(x)
        group = self.process_group
        monitor = begin_call(group, self.name, x, training=self.training)
        with FailTogether(monitor, self.name, unanimous=(RoutingError, _StopRecomputationError)):
            if x.dim() < 1 or x.shape[-1] != self.hidden or not x.is_floating_point():
                raise UsageError(
                    f"{self.name}: the input must be of floating-point numbers [..., {self.hidden}], got {x.dtype} "
                    f"{list(x.shape)}; its last dimension must be the layer's hidden size"
                )
            return self._run(x.reshape(-1, self.hidden), group).view(x.shape)

    def _run(self, x: Tensor, group: ProcessGroup | None) -> Tensor:
        routing, demand, placement, opened = self._route(x)
        tokens, weights = self.shard_tokens(x), self.experts.weights
        if self._experts_are_shared:
            label = f"gradients of experts of {self.name}"
            weights = weights.like(sum_gradients(weights.given, group_of(self._tensor_group), label))
        if torch.is_autocast_enabled(x.device.type):  # half the bytes are sent, of tokens and of experts
            dtype = torch.get_autocast_dtype(x.device.type)
            tokens, weights = tokens.to(dtype), weights.like([weight.to(dtype) for weight in weights.given])
        run = self.forward_of(demand, placement, x.device)

        def meanwhile() -> Tensor | None:
            self.observe(run, demand, routing, opened)
            return self.shared_expert(tokens)

        y, shared = run.through(tokens, routing, weights, meanwhile)
        y = self.gather_tokens(y if shared is None else y + shared, len(x))
        if opened is not None:
            opened.done = True
        return closing(y, opened, self.name, group_name(group))

    def _route(self, x: Tensor) -> tuple[Routing, ExpertCounts, Placement, ForwardPass | None]:
        """This rank's part of the routing, the gathered counts, the placement, and the open pass in training."""
        passes, opened, index = self._placement_state.passes, None, 0
        again = self.training and is_recomputation()
        settings = passes.settings() if again else [self._current(len(x))]
        if not settings:
            raise RoutingError(
                f"{self.name}: called in a backward pass, but there is no open training pass to recompute; "
                "call it in evaluation mode there"
            )
        routings = [self.routing_of(x, setting) for setting in settings]
        demands = self.start_counts(routings, settings)()
        if again:
            index, opened = passes.find(settings, [demand.counts for demand in demands], self.name)
        elif self.training:
            opened = self._placement_state.open(settings[0])
        return routings[index], demands[index], settings[index].placement, opened

    def _current(self, tokens: int) -> RoutingState:
        """Routing state of a pass that begins now; of a training pass a new one if no pass is open."""
        state, group = self._placement_state, self.process_group
        if self.training:
            if state.needs_costs and group is not None:
                state.costs = self.measured(tokens, group)
            state.begin(self.router, group_of(self._load_group))
        return state.setting(self.router)

    # --- the pieces that a stack of experts runs one by one ---

    def begin(self, tokens: int) -> tuple[RoutingState, ForwardPass | None]:
        """Begin a forward pass of so many tokens; return its routing state, and in training the open pass."""
        opened = self._placement_state.passes.newest() if self.training and is_recomputation() else None
        if opened is not None:
            return opened.setting, opened
        setting = self._current(tokens)
        return setting, self._placement_state.open(setting) if self.training else None

    def measured(self, tokens: int, group: ProcessGroup, known: dict[Any, Costs] | None = None) -> Costs:
        """Measure the costs of calls of so many tokens. known: see `measure_costs`."""
        per_expert = tokens * self.router.top_k // self.router.num_experts
        weights = self.experts.weights
        return measure_costs(weights, per_expert, self.compute, group, self.name, wire=self.wire_dtype, known=known)

    def routing_of(self, x: Tensor, setting: RoutingState) -> Routing:
        """[T, hidden] -> this rank's part of the routing."""
        routing, tensor_group = self.router(x, bias=setting.bias), group_of(self._tensor_group)
        if group_size(tensor_group) == 1:
            return routing
        first, last = shard_bounds(len(x), tensor_group)
        return routing.part(first, last, self.shard_tokens(routing.weights))

    def start_counts(self, routings: list[Routing], settings: list[RoutingState]) -> Callable[[], list[ExpertCounts]]:
        """Start to gather the counts of routings under these states; call the result for them."""
        state = self._placement_state.state(settings, training=self.training)
        return start_counts(routings, self.process_group, state=state, label=self.name)

    def shard_tokens(self, x: Tensor) -> Tensor:
        """[T, ...], which all tensor-parallel ranks hold -> this rank's share; the gradient is gathered."""
        return scatter(x, group_of(self._tensor_group), Cut(0, (len(x),), level=True), "gradients of shared tokens")

    def gather_tokens(self, y: Tensor, tokens: int) -> Tensor:
        """This rank's share -> all of so many tokens, on all tensor-parallel ranks."""
        return gather(y, group_of(self._tensor_group), Cut(0, (tokens,), level=True), "outputs of shared tokens")

    def shared_expert(self, tokens: Tensor) -> Tensor | None:
        """Result of the shared expert for this rank's share; None without one."""
        tensor_group = group_of(self._tensor_group)
        if self.shared is None or group_size(tensor_group) == 1:
            return None if self.shared is None else self.shared(tokens)
        names, parameters = zip(*self.shared.named_parameters(), strict=True)
        label = f"gradients of the shared expert of {self.name}"
        found = dict(zip(names, sum_gradients(parameters, tensor_group, label), strict=True))
        return torch.func.functional_call(self.shared, found, (tokens,))

    def forward_of(self, demand: ExpertCounts, placement: Placement, device: torch.device) -> ExpertForward:
        """Forward pass of the experts once the counts are known."""
        return ExpertForward(
            self.compute, self.process_group, demand.counts, placement, device, self.name, self.wire_dtype
        )

    def compute(self, rows: Tensor, counts: list[int], weights: ExpertWeights) -> Tensor:
        """Run rows through experts with these weights, as `oases.moe.experts.compute`."""
        return compute(rows, counts, weights, middle_of(self.experts.gated))

    def observe(self, run: ExpertForward, demand: ExpertCounts, routing: Routing, opened: ForwardPass | None) -> None:
        """Once tokens are under way: plan the next placement of a training pass, and set `last`."""
        if opened is not None and opened.counts is None:  # not in a recomputation
            opened.counts = demand.counts
            self._placement_state.observe(demand.counts)
            self.router.note(routing.demand)
        if not is_recomputation():
            sent = 0 if run.transfer is None else run.transfer.bytes
            self.last = MoEStatistics(
                demand.counts, run.placement, demand.dropped, run.token_bytes, sent, routing.balance_loss,
                routing.z_loss,
            )  # fmt: skip

    def summed_over_tensor_ranks(self, gradients: list[Tensor]) -> list[Tensor]:
        """Sum the owned experts' gradients over tensor-parallel ranks that hold the same experts."""
        if not self._experts_are_shared:
            return gradients
        return total(gradients, group_of(self._tensor_group), f"gradients of experts of {self.name}")

    def extra_repr(self) -> str:
        """Placement method."""
        return f"placement={self._placement_state.method!r}"


def _share_experts(tensor_group: ProcessGroup | None, group: ProcessGroup | None, name: str) -> bool:
    """Whether the tensor-parallel ranks hold the same experts. UsageError where only some do."""
    if group_size(tensor_group) == 1:
        return False
    assert tensor_group is not None
    tensor = set(dist.get_process_group_ranks(tensor_group))
    spread = set(dist.get_process_group_ranks(group)) if group is not None else set()
    common = len(tensor & spread)
    if common not in (1, len(tensor)):
        raise UsageError(
            f"{name}: of the tensor-parallel ranks {sorted(tensor)} some, but not all, are among the expert-parallel "
            f"ranks {sorted(spread)}; give all of them, or only this rank"
        )
    return common == 1
