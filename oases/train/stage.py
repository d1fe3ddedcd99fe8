"""A pipeline stage of the built-in GPT in training: its passes, the loss on every rank, the tied table's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oases.execution.executor import Context
from oases.execution.group import ProcessGroup
from oases.models.gpt import GPT
from oases.parallel.average import GradientAverage
from oases.parallel.collectives import all_reduce
from oases.parallel.fsdp import ShardedAverage, local
from oases.parallel.mesh import Mesh
from oases.parallel.messages import Messages
from oases.parallel.parts import pipeline_of
from oases.parallel.pipeline import Forward, StageRun
from oases.plans.plan import Plan

MicroBatches = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets of each, of this rank's share of the samples."""


class TrainedStage:
    """What a rank does of a step where a plan has several stages. All ranks make it together, and call it together.

    model: this rank's stage of it, where it stays. mesh: of the plan. group: all ranks of the run.
    """

    def __init__(self, model: GPT, plan: Plan, mesh: Mesh, group: ProcessGroup | None) -> None:
        self.model, self.mesh, self.group = model, mesh, group
        degrees = [part.last_degree for part in plan.parts[:-1]]
        pipeline = pipeline_of(plan)
        device = next(model.parameters()).device
        self.messages = Messages(pipeline, mesh, degrees, device=device)
        self.run = StageRun(pipeline, mesh.stage, self.messages)

    def backward(self, batches: MicroBatches, average: GradientAverage | ShardedAverage) -> float:
        """Forward and backward passes of a step; the loss of its batch. Gradients are those of the whole batch."""
        losses = self.run.run(self._forward(batches), average.overlapped())
        tied = self.model.tied
        if tied is not None and tied.grad is not None:  # after the average: both sums are of what is averaged
            all_reduce(local(tied.grad), self.mesh.ends, "tied table")
        return self._everywhere(losses)

    def evaluate(self, batches: MicroBatches) -> float:
        """Forward passes alone; the mean loss."""
        return self._everywhere(self.run.evaluate(self._forward(batches)))

    def _forward(self, batches: MicroBatches) -> Forward:
        def forward(part: int, micro_batch: int, x: Tensor | None, context: Context) -> Tensor:
            y = self.model.run_part(part, x, *batches[micro_batch], context)
            return y / len(batches) if y.dim() == 0 else y

        return forward

    def _everywhere(self, losses: list[Tensor]) -> float:
        """The sum of the last stage's losses, averaged over its replicas, on every rank."""
        parameter = next(self.model.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.zeros(1, dtype=dtype, device=parameter.device)
        for loss in losses:
            total += loss
        return float(all_reduce(total, self.group, "loss")) / self.mesh.ranks
