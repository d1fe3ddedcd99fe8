"""OverlappedMoE: expert-parallel mixture of experts with load-balanced placement.

Results are those of plain expert parallelism for every placement. A forward pass routes tokens (`Router`), gathers
the counts of all ranks (`exchange_counts`) and runs `ExpertForward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from oases.core.execution.communication import WireType, wire_type
from oases.core.execution.failure import FailsTogether, FailTogether, refuse_capture
from oases.core.execution.group import (
    ProcessGroup,
    group_name,
    group_of,
    group_rank,
    group_size,
    resolve,
)
from oases.errors import UsageError
from oases.moe.cost_measurement import measure_costs
from oases.moe.costs import Costs
from oases.moe.dispatch import (
    DispatchPlan,
    ExpertCounts,
    RoutingError,
    bytes_sent,
    exchange_counts,
    start_counts,
    wire_bytes,
)
from oases.moe.experts import Experts, ExpertWeights, SharedExpert, compute
from oases.moe.forward import ExpertForward
from oases.moe.placement_data import Placement
from oases.moe.placement_state import METHODS, MoEStatistics, PlacementState, numbered, statistics_of
from oases.moe.recomputation import ForwardPass, RoutingState, begin_call, closing, is_recomputation
from oases.moe.router import Gate, Router, Routing
from oases.moe.token_shards import experts_are_shared, gather_tokens, shard_bounds, shard_tokens, sum_gradients, total
from oases.moe.traces import Recorder


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
    training steps: see `oases.moe.recomputation`. UsageError for invalid arguments; RoutingError, on all ranks, for
    gates that are not finite.
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
        if placement not in METHODS:
            raise UsageError(f"{name}: unknown placement {placement!r}; known are {', '.join(METHODS)}")
        if shared_intermediate < 0:
            raise UsageError(f"{name}: shared_intermediate must be at least 0, got {shared_intermediate}")
        if memory_budget is not None and not memory_budget >= 0:
            raise UsageError(f"{name}: memory_budget must be at least 0 bytes, got {memory_budget}")
        self.hidden, self.name, self.wire_dtype = hidden, name, wire_type(wire_dtype)
        self.process_group = group = resolve(process_group)
        self._load_group = group_name(load_group if load_group is not None else group)
        self._tensor_group = group_name(tensor_group)
        self._experts_are_shared = experts_are_shared(tensor_group, group, name)
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
        self._recorder: tuple[Recorder, int] | None = None
        self._broadcast_parameters()

    @torch.no_grad()
    def _broadcast_parameters(self) -> None:
        """Broadcast the first rank's router and shared expert."""
        group = self.process_group
        if group is None or group_size(group) == 1 or self.router.weight.is_meta:
            return
        source = torch.distributed.get_global_rank(group, 0)
        for module in (self.router, self.shared):
            for parameter in module.parameters() if module is not None else ():
                torch.distributed.broadcast(parameter.data, source, group=group)

    @classmethod
    def from_whole(cls, whole: OverlappedMoE, *, process_group: ProcessGroup | None = None, **options: Any) -> Any:
        """This rank's part of a layer that every rank holds in full, without a new random draw.

        options: placement, costs, memory_budget, load_group, tensor_group, wire_dtype and name of the new layer.
        """
        router, shared = whole.router, whole.shared
        with torch.device("meta"):
            made: Any = cls
            found = made(
                whole.hidden, whole.experts.down.shape[2], router.num_experts, top_k=router.top_k,
                process_group=process_group, gated=whole.experts.gated, bias=whole.experts.up_bias is not None,
                shared_intermediate=0 if shared is None else shared.down.in_features,
                shared_gate=shared is not None and shared.gate is not None, gate=router.gate,
                normalised=router.normalised, scale=router.scale, balance_weight=router.balance_weight,
                z_weight=router.z_weight, bias_update_rate=router.bias_update_rate,
                capacity_factor=router.capacity_factor, **options,
            )  # fmt: skip
        found.experts = Experts.from_experts(whole.experts, process_group=process_group)
        for module, copied in ((found.router, router), (found.shared, shared)):
            if copied is not None:
                module.to_empty(device=router.weight.device)
                module.to(router.weight.dtype)
                module.load_state_dict(copied.state_dict())
        return found.train(whole.training)

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

    def record(self, recorder: Recorder | None, layer: int = 0) -> None:
        """Have the group's first rank record the counts of every training pass under this layer number."""
        self._recorder = None if recorder is None else (recorder, layer)

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
        routing, demand, placement, opened = self._route(x, group)
        tensor_group = group_of(self._tensor_group)
        tokens = shard_tokens(x, tensor_group)
        weights = self._weights(tensor_group)
        if torch.is_autocast_enabled(x.device.type):  # half the bytes are sent, of tokens and of experts
            dtype = torch.get_autocast_dtype(x.device.type)
            tokens, weights = tokens.to(dtype), weights.like([weight.to(dtype) for weight in weights.given])
        run = self.forward_of(demand, placement, x.device)

        def meanwhile() -> Tensor | None:
            if opened is not None and opened.counts is None:  # not in a recomputation
                self._observe(opened, demand, routing)
            return self.shared_expert(tokens)

        y, shared = run.through(tokens, routing, weights, meanwhile)
        if shared is not None:
            y = y + shared
        y = gather_tokens(y, len(x), tensor_group)
        if opened is not None:
            opened.done = True
        if not is_recomputation():
            sent = 0 if run.transfer is None else run.transfer.bytes
            token_bytes = self._token_bytes(run.plan, tokens.dtype)
            self.last = statistics_of(demand, placement, routing, token_bytes, sent)
        return closing(y, opened, self.name, group_name(group))

    def _route(
        self, x: Tensor, group: ProcessGroup | None
    ) -> tuple[Routing, ExpertCounts, Placement, ForwardPass | None]:
        """This rank's part of the routing, the gathered counts, the placement, and the open pass in training."""
        opened = None
        again = self.training and is_recomputation()
        if again:
            settings = self._placement_state.passes.settings()
            if not settings:
                raise RoutingError(
                    f"{self.name}: called in a backward pass, but there is no open training pass to recompute; "
                    "call it in evaluation mode there"
                )
        else:
            settings = [self._current(len(x))]
        routings = [self._share_of(self.router(x, bias=setting.bias)) for setting in settings]
        state = self._placement_state.state(settings, training=self.training)
        demand = exchange_counts(routings, group, state=state, label=self.name)
        index = 0
        if again:
            index, opened = self._placement_state.passes.find(settings, demand.candidates, self.name)
            demand = ExpertCounts(demand.candidates[index : index + 1], demand.slots)
        elif self.training:
            opened = self._placement_state.open(settings[0])
        return routings[index], demand, settings[index].placement, opened

    # --- the pieces that a stack of experts runs one by one ---

    def begin(self, tokens: int) -> tuple[RoutingState, ForwardPass | None]:
        """Begin a forward pass of so many tokens; return its routing state, and in training the open pass."""
        opened = self._placement_state.passes.newest() if self.training and is_recomputation() else None
        if opened is not None:
            return opened.setting, opened
        setting = self._current(tokens)
        return setting, self._placement_state.open(setting) if self.training else None

    def routed(
        self, x: Tensor, setting: RoutingState, demand: ExpertCounts | None
    ) -> tuple[Routing, Callable[[], ExpertCounts]]:
        """[T, hidden] -> this rank's part of the routing; call the second for the counts, `demand` or gathered."""
        routing = self._share_of(self.router(x, bias=setting.bias))
        if demand is not None:
            return routing, lambda: demand
        state = self._placement_state.state([setting], training=self.training)
        return routing, start_counts([routing], self.process_group, state=state, label=self.name)

    def shard_tokens(self, x: Tensor) -> Tensor:
        """This rank's share of tokens that all tensor-parallel ranks hold."""
        return shard_tokens(x, group_of(self._tensor_group))

    def gather_tokens(self, y: Tensor, tokens: int) -> Tensor:
        """Gather the tensor-parallel ranks' shares of so many tokens."""
        return gather_tokens(y, tokens, group_of(self._tensor_group))

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
        return compute(rows, counts, weights, gated=self.experts.gated)

    def observe(
        self, opened: ForwardPass, demand: ExpertCounts, routing: Routing, plan: DispatchPlan, expert_bytes: int
    ) -> None:
        """Record a training pass: plans the next placement, writes load traces, sets `last`."""
        if opened.counts is None:
            self._observe(opened, demand, routing)
        token_bytes = self._token_bytes(plan, self.experts.up.dtype)
        self.last = statistics_of(demand, opened.setting.placement, routing, token_bytes, expert_bytes)

    def _token_bytes(self, plan: DispatchPlan, dtype: torch.dtype) -> int:
        """Bytes that this rank sends to others in dispatch and combine."""
        return bytes_sent(plan, self.process_group, self.hidden * wire_bytes(dtype, self.wire_dtype))

    def summed_over_tensor_ranks(self, gradients: list[Tensor]) -> list[Tensor]:
        """Sum the owned experts' gradients over tensor-parallel ranks that hold the same experts."""
        if not self._experts_are_shared:
            return gradients
        label = f"gradients of experts of {self.name}"
        return total(gradients, group_of(self._tensor_group), label)

    def _current(self, tokens: int) -> RoutingState:
        """Routing state of a pass that begins now; of a training pass a new one if no pass is open."""
        state, group = self._placement_state, self.process_group
        if self.training:
            if state.needs_costs and group is not None:
                per_expert = tokens * self.router.top_k // self.router.num_experts
                state.costs = measure_costs(
                    self.experts.weights, per_expert, self.experts.gated, group, self.name, wire=self.wire_dtype
                )
            state.begin(self.router, group_of(self._load_group))
        return state.setting(self.router)

    def _observe(self, opened: ForwardPass, demand: ExpertCounts, routing: Routing) -> None:
        opened.counts = demand.counts
        self._placement_state.observe(demand.counts)
        self.router.note(routing.demand)
        if self._recorder is not None and group_rank(self.process_group) == 0:
            (recorder, layer), state = self._recorder, self._placement_state
            recorder.write(state.number - 1, layer, demand.counts)

    def _share_of(self, routing: Routing) -> Routing:
        tensor_group = group_of(self._tensor_group)
        if group_size(tensor_group) == 1:
            return routing
        first, last = shard_bounds(len(routing.experts), tensor_group)
        return routing.part(first, last, shard_tokens(routing.weights, tensor_group))

    def _weights(self, tensor_group: ProcessGroup | None) -> ExpertWeights:
        weights = self.experts.weights
        if not self._experts_are_shared:
            return weights
        return weights.like(sum_gradients(weights.given, tensor_group, f"gradients of experts of {self.name}"))

    def extra_repr(self) -> str:
        """Placement method."""
        return f"placement={self._placement_state.method!r}"
