"""ExpertStack: consecutive blocks of experts, run as one, so that transfers of one overlap with another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from oases.core.blocks.block_list import BlockList
from oases.core.execution.executor import Context
from oases.core.execution.failure import FailsTogether, FailTogether, refuse_capture
from oases.core.execution.gathering import BlockUnit, leaves_of
from oases.core.execution.group import ProcessGroup
from oases.core.execution.piece import BlockParameters
from oases.core.schedule import Schedule, validate
from oases.errors import UsageError
from oases.moe.call import ExpertCall, ExpertExchange, ExpertProgram, ExpertWork
from oases.moe.cost_measurement import measured_seconds
from oases.moe.costs import Costs
from oases.moe.dispatch import RoutingError
from oases.moe.experts import Experts
from oases.moe.layer import OverlappedMoE
from oases.moe.state import begin_call
from oases.plans.expert_schedules import generate_experts

_BYPASSED = (OverlappedMoE, Experts)  # modules whose weights a stack reads without a call
_numbers = itertools.count()


class ExpertStack(FailsTogether, nn.Module):
    """Blocks with experts, whose replica and gradient transfers overlap with other blocks.

    blocks: modules with an `OverlappedMoE` called experts, and the layers around it: before(x) -> (x, h), h the
    experts' input and x what bypasses them, and after(x, y) -> the block's output, y the experts' output. schedule:
    "block_wise" (Pro-Prophet's), "blocking" (no overlap of replica transfers), or "plain", for blocks whose placement
    is "none"; or a list made by `generate_experts` for as many blocks. recompute: keep of each block its received
    tensors alone, and recompute the rest during gradient transfers. gradient_scale: factor on the experts' gradients:
    1 / replicas, where other gradients are averaged over replicas. A call returns the output of the blocks one after
    another and the same gradients, block by block. Unknown costs are measured in the first training pass, which runs
    `before` several times more. Input and output: [..., hidden], this rank's own tokens. UsageError for blocks
    without experts or with different groups, and for a schedule that does not fit them.
    """

    def __init__(
        self, blocks: Iterable[nn.Module], *, schedule: str | Schedule = "block_wise", recompute: bool = False,
        gradient_scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._block_list = BlockList([*self.blocks], BlockParameters, _BYPASSED, "before() and after()")
        if not len(self.blocks):
            raise UsageError("ExpertStack: it has no blocks; give at least 1")
        for number, block in enumerate(self.blocks):
            if not isinstance(getattr(block, "experts", None), OverlappedMoE):
                raise UsageError(
                    f"ExpertStack: block {number}, {type(block).__name__}, has no OverlappedMoE called experts"
                )
        layers = self._layers
        self.process_group = layers[0].process_group
        if any(layer.process_group is not self.process_group for layer in layers):
            raise UsageError("ExpertStack: its blocks shard their experts over different groups; use one group")
        if isinstance(schedule, str):
            schedule = generate_experts(schedule, len(self.blocks), recompute)
        validate(schedule, "experts")
        if schedule.num_blocks != len(self.blocks):
            raise UsageError(
                f"ExpertStack: schedule {schedule.name} is for {schedule.num_blocks} blocks, but "
                f"{len(self.blocks)} are required"
            )
        placing = [layer.placement for layer in layers if layer.placement != "none"]
        if placing and not schedule.copies:
            raise UsageError(
                f"ExpertStack: schedule {schedule.name} moves no experts, and placement is {placing[0]!r}; give "
                "placement='none' or schedule='block_wise'"
            )
        self.schedule = schedule
        self.label = f"expert stack {next(_numbers)}"
        """Name of this stack in errors."""
        self._gradient_scale = gradient_scale
        self._program = ExpertProgram(schedule, self.label)
        self._compiled: list[nn.Module] = []
        self._units: list[BlockUnit] = []

    @property
    def _layers(self) -> list[OverlappedMoE]:
        return [cast(OverlappedMoE, block.experts) for block in self.blocks]

    @torch.no_grad()
    def _measure(self, x: Tensor, group: ProcessGroup) -> None:
        """Measure the costs of layers without costs, and of their non-expert parts if transfers overlap with them.

        Layers with experts of equal sizes share one measurement.
        """
        known: dict[Any, Costs] = {}
        others: dict[Costs, float] = {}
        devices = [] if x.device.type == "cpu" else [x.device]
        for number, (block, layer) in enumerate(zip(self.blocks, self._layers, strict=True)):
            if not layer.needs_costs:
                continue
            costs = layer.measured(x.numel() // x.shape[-1], group, known)
            if self.schedule.name == "block_wise":
                if costs not in others:
                    if self._units:
                        self._units[number].gather()
                    with torch.random.fork_rng(devices, device_type=x.device.type):
                        before = partial(cast(Any, block).before, x)
                        others[costs] = measured_seconds(before, x.device, group, layer.name)
                    if self._units:
                        self._units[number].release()
                costs = replace(costs, scheduled=True, non_expert_seconds=others[costs])
            layer.costs = replace(costs, leading=not number)

    def compile_blocks(self, **options: Any) -> None:
        """Compile `before` and `after` of every block; options: of torch.compile. Parameter names stay."""
        # In a plain list: torch.compile's wrapper would put a prefix before the names of a block's parameters.
        self._compiled = [cast(nn.Module, torch.compile(block, **options)) for block in self.blocks]

    def shard(self, units: Sequence[BlockUnit]) -> None:
        """Have a unit per block gather its weights, except experts, as the schedule needs them."""
        self._units = list(units)

    def forward(self, x: Tensor, *, context: Context | None = None) -> Tensor:
        """[..., hidden] -> the same shape. context: spans to record, a pipeline's handles."""
        refuse_capture(x)
        if not self._block_list.is_of(self.blocks):
            raise RuntimeError(f"{self.label}: its blocks were replaced; make a new ExpertStack of them")
        group = self.process_group
        monitor = begin_call(group, self.label, x, training=self.training)
        differentiable = torch.is_grad_enabled()
        blocks = self._compiled or list(self.blocks)
        parameters = self._block_list.parameters(gathered=bool(self._units))
        with FailTogether(monitor, f"the start of {self.label}", unanimous=(RoutingError,)):
            if self.training and group is not None:
                self._measure(x, group)
            leaves = leaves_of(parameters, self._units) if differentiable else []
            exchanges = [
                ExpertExchange(
                    block, x.numel() // x.shape[-1], copies=self.schedule.copies, gradient_scale=self._gradient_scale
                )
                for block in blocks
            ]
            work = ExpertWork(exchanges, self._program, x.detach(), leaves, parameters, differentiable=differentiable)
        call = ExpertCall(
            "ExpertStack", self._program, work, parameters, monitor=monitor, context=context or Context(),
            units=self._units, differentiable=differentiable, unanimous=(RoutingError,),
        )  # fmt: skip
        return call.apply(x)
