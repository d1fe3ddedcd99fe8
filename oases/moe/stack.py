"""ExpertStack: blocks of experts in a row, run as one, so that what travels for one hides under another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from oases.errors import UsageError
from oases.execution.failure import told, watch_of
from oases.execution.group import HoldsGroup, ProcessGroup, group_size, scheduler_of
from oases.moe.costs import Costs
from oases.moe.dispatch import RoutingError
from oases.moe.execution import ExpertBlock, ExpertExecution
from oases.moe.layer import OverlappedMoE
from oases.moe.measure import mean_seconds, measured
from oases.schedule import Schedule, generate_experts


class ExpertStack(HoldsGroup, nn.Module):
    """Blocks with experts (`ExpertBlock`), whose copies and gradients travel under the compute of other blocks.

    schedule: "block_wise" (Pro-Prophet's), "blocking" (nothing hides the copies), or "plain", for blocks whose
    placement is "none"; or a list made by `generate_experts` for as many blocks. recompute: keep of each block what
    came over the wire, and compute the rest again under the gradients' ways.
    A call gives what the blocks give one after another, `after(x, experts(h))` with `x, h = before(x)`, and the
    same gradients. Those of parameters are added to `.grad`, hooks included, as by `loss.backward()`;
    `torch.autograd.grad` finds that of the input alone. Costs of layers that were given none are measured in the
    first pass in training, for which `before` is run some times more.
    Input and output: [..., hidden], this rank's own tokens. UsageError for blocks without experts or over several
    groups, and for a schedule that does not fit them.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        schedule: str | Schedule = "block_wise",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
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
            raise UsageError("ExpertStack: its blocks spread their experts over different groups; give all the same")
        if isinstance(schedule, str):
            schedule = generate_experts(schedule, len(self.blocks), recompute)
        if schedule.num_blocks != len(self.blocks):
            raise UsageError(
                f"ExpertStack: schedule {schedule.name} is for {schedule.num_blocks} blocks, and there are "
                f"{len(self.blocks)}"
            )
        placing = [layer.placement for layer in layers if layer.placement != "none"]
        if placing and not schedule.copies:
            raise UsageError(
                f"ExpertStack: schedule {schedule.name} moves no experts, and placement is {placing[0]!r}; give "
                "placement='none' or schedule='block_wise'"
            )
        self.schedule = schedule
        self.gradient_scale = 1.0
        """Times the experts' gradients: 1 / replicas, where other gradients are averaged over replicas."""
        self.spans: list[tuple[str, Any, Any]] | None = None
        """Set to a list to have (op, start, end) appended of every op, in what `clock` gives."""
        self.clock: Callable[[], Any] = time.perf_counter

    @property
    def _layers(self) -> list[OverlappedMoE]:
        return [cast(OverlappedMoE, block.experts) for block in self.blocks]

    @torch.no_grad()
    def _measure(self, x: Tensor, group: ProcessGroup) -> None:
        """Give layers without costs those measured here, with what lies between them if copies travel under it.

        Layers with experts of equal sizes are taken to be alike.
        """
        known: dict[tuple[Any, ...], Costs] = {}
        for block, layer in zip(self.blocks, self._layers, strict=True):
            if not layer.needs_costs:
                continue
            weights, gated = layer.experts.weights, layer.experts.gated
            sizes = (gated, *((weight.shape, weight.dtype) for weight in weights.given))
            if sizes not in known:
                per_expert = x.numel() // x.shape[-1] * layer.router.top_k // layer.router.num_experts
                costs = measured(weights, per_expert, gated, group, layer.name)
                if self.schedule.name == "block_wise":
                    before = cast(ExpertBlock, block).before
                    with torch.random.fork_rng([x.device] if x.is_cuda else []):
                        seconds = mean_seconds(partial(before, x), x.device, group, layer.name)
                    costs = replace(costs, scheduled=True, non_expert_seconds=seconds)
                known[sizes] = costs
            layer.costs = replace(known[sizes], leading=block is self.blocks[0])

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape."""
        group, watch = self.process_group, None
        if group is not None and group_size(group) > 1:
            watch = watch_of(group, scheduler_of(group), x.device)
        differentiable = torch.is_grad_enabled()
        blocks = cast(list[ExpertBlock], list(self.blocks))
        with told(watch, "ExpertStack", unanimous=(RoutingError,)):
            if self.training and group is not None:
                self._measure(x, group)
            execution = ExpertExecution(
                blocks, self.schedule, group, x, differentiable=differentiable, gradient_scale=self.gradient_scale,
                spans=self.spans, clock=self.clock,
            )  # fmt: skip
            if not differentiable:
                return execution.run_forward()
            # So that the backward pass is called, whose parameters are no inputs of this node.
            entered = x if x.requires_grad else x.detach().requires_grad_()
            output: Tensor = _Call.apply(execution, watch, entered)
        return output


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, execution: ExpertExecution, watch: Any, x: Tensor) -> Tensor:
        ctx.execution, ctx.watch = execution, watch
        with torch.enable_grad():
            return execution.run_forward()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        with told(ctx.watch, "the backward pass of ExpertStack"), torch.enable_grad():
            return None, None, ctx.execution.run_backward(grad)
