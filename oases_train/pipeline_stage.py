"""Pipeline stage of a training run: its passes, the loss on every rank, the gradient of tied embeddings.

A run without pipeline parallelism has one stage. `GPTStage` runs the built-in GPT, `ModelStage` a model that
`parallelize` divided; to the trainer they are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oases.core.execution.dtensors import local_of
from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup, group_size
from oases.distributed.collectives import all_reduce
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages
from oases.distributed.pipeline import Forward, StageRunner
from oases.distributed.precision import is_low
from oases.distributed.sharded_gradients import ShardedGradientAverager
from oases.models.gpt import Decoder
from oases.plans.check import pipeline_of
from oases.plans.plan import Plan

MicroBatches = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets of each micro-batch, for this rank's replica."""
Samples = Any
"""Samples of this rank's replica: MicroBatches for the built-in GPT, arguments of the forward for other models."""


class Stage(Protocol):
    """One rank's part of a training step, whichever the model. Passes are collectives over all ranks.

    messages: to and from other stages; None for a single stage. tensor_parallel: degree of the replica whose samples
    this rank reads. counted_elsewhere: parameters that another stage counts in the gradient norm.
    """

    messages: StageMessages | None
    tensor_parallel: int

    @property
    def counted_elsewhere(self) -> Sequence[nn.Parameter]: ...  # noqa: D102

    def parts(self) -> Iterable[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Parameters with the data-parallel group of each, in order of the forward pass."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Shard the weights if the plan does, before the optimizer is made. dtype: of the weights in passes."""

    def begin(self, number: int) -> None:
        """Set the number of the next pass in the whole training, from which random numbers are derived."""

    def backward(self, samples: Samples) -> float:
        """Run a step's forward and backward passes; returns the loss. Gradients are of the whole batch."""

    def evaluate(self, batches: Sequence[Samples]) -> float:
        """Run forward passes only; returns the mean loss of the batches."""

    def close(self) -> None:
        """Close the messages."""


class GPTStage:
    """A stage of the built-in GPT. The constructor is a collective over all ranks.

    model: this rank's stage, already on its device. mesh: of the plan. group: all ranks of the run. after_forward:
    called in training with the index of a model chunk when a micro-batch's forward pass through it is done.
    gradient_wire, pipeline_wire: "int8" for quantised averages and messages; None for their own type.
    """

    def __init__(
        self,
        model: Decoder,
        plan: Plan,
        mesh: Mesh,
        group: ProcessGroup | None,
        after_forward: Callable[[int], None],
        *,
        gradient_wire: str | None = None,
        pipeline_wire: str | None = None,
    ) -> None:
        self._gradient_wire = gradient_wire or ""
        self.model, self.mesh, self.group, self._after_forward = model, mesh, group, after_forward
        pipeline = pipeline_of(plan)
        self.messages: StageMessages | None = None
        """Point-to-point messages with other stages; None for a single stage."""
        if mesh.num_stages > 1:
            degrees = [part.last_degree for part in plan.parts[:-1]]
            device = next(model.parameters()).device
            self.messages = StageMessages(pipeline, mesh, degrees, device=device, wire=pipeline_wire or "")
        self.run = StageRunner(pipeline, mesh.stage, self.messages)
        self.tensor_parallel = model.tensor_parallel
        self._sharding = "fsdp" if plan.fsdp else "zero" if plan.zero else None
        self._average: GradientAverager | ShardedGradientAverager | None = None

    @property
    def counted_elsewhere(self) -> Sequence[nn.Parameter]:
        """The tied table of the last stage, which the first one counts."""
        return [] if self.model.is_first or self.model.tied is None else [self.model.tied]

    def parts(self) -> Iterable[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Parameters with the data-parallel group of each, in order of the forward pass."""
        return self.model.parts()

    def prepare(self, dtype: torch.dtype) -> None:
        """Shard the weights if the plan does. Gradients are averaged from the first backward pass on."""
        if self._sharding is not None:
            low = dtype if is_low(dtype) else None
            self._average = self.model.shard_weights(
                low, keep=self._sharding == "zero", gradient_wire=self._gradient_wire
            )

    def begin(self, number: int) -> None:
        """Set the number of the next pass in the whole training, from which random numbers are derived."""
        self.model.at_call(number)

    def backward(self, samples: MicroBatches) -> float:
        """Run a step's forward and backward passes; returns the loss. Gradients are of the whole batch."""
        if self._average is None:  # once the optimizer has set the gradients' types
            self._average = GradientAverager(self.model.parts(), wire=self._gradient_wire)
        losses = self.run.run(self._forward(samples, len(samples)), self._average)
        tied = self.model.tied
        if tied is not None and tied.grad is not None:  # after averaging: first and last stage sum averaged gradients
            all_reduce(local_of(tied.grad), self.mesh.embedding_group, "tied embeddings")
        if self.mesh.num_stages == 1:
            return self._over_replicas(torch.stack(losses).sum())
        return self._on_all_stages(losses)

    def evaluate(self, batches: Sequence[MicroBatches]) -> float:
        """Run forward passes only; returns the mean loss of the batches."""
        try:
            if self.mesh.num_stages == 1:
                losses = [loss for batch in batches for loss in self.run.evaluate(self._forward(batch, 1))]
                return self._over_replicas(torch.stack(losses).mean())
            found = [self._on_all_stages(self.run.evaluate(self._forward(batch, len(batch)))) for batch in batches]
            return sum(found) / len(batches)
        finally:
            if isinstance(self._average, ShardedGradientAverager):
                self._average.free()

    def close(self) -> None:
        """Close the messages."""
        if self.messages is not None:
            self.messages.close()

    def _forward(self, batches: MicroBatches, over: int) -> Forward:
        """Forward function of the stage's chunks; losses are divided by `over`."""

        def forward(part: int, micro_batch: int, inputs: Sequence[Tensor], context: Context) -> Sequence[Tensor]:
            y = self.model.run_part(part, inputs[0] if inputs else None, *batches[micro_batch], context)
            if torch.is_grad_enabled():
                self._after_forward(part)
            return [y / over if y.dim() == 0 else y]

        return forward

    def _over_replicas(self, loss: Tensor) -> float:
        """Mean loss over replicas, for a single stage."""
        group = self.mesh.data(self.model.tensor_parallel)
        return float(all_reduce(loss.reshape(1), group, "loss")) / group_size(group)

    def _on_all_stages(self, losses: list[Tensor]) -> float:
        """Sum of the last part's losses, averaged over replicas, on every rank."""
        parameter = next(self.model.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.zeros(1, dtype=dtype, device=parameter.device)
        for loss in losses:
            total += loss
        return float(all_reduce(total, self.group, "loss")) / self.mesh.ranks
