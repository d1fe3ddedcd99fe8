"""Other people's pipelines, as contestants: torch.distributed.pipelining, and it over torch's other parallelism.

Stages hold the same timed blocks as ours, as many of them. Tensor parallelism is what ColwiseParallel and
RowwiseParallel make of a block: a replicated DTensor whose gradient is a partial sum goes in, a partial sum comes
out, and both are redistributed: all-reduced. Recomputation is torch's checkpoint around each layer, sums included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_rank
from oases.parallel.mesh import Mesh
from oases.plans.plan import Plan
from oases.simulator.hardware import Hardware
from oases_bench.harness import timed_step
from oases_bench.stage_steps import timed_block
from oases_bench.timed_block import TimedBlock

BASELINES = ("torch",)
"""With all three kinds of parallelism."""
PIPELINE_BASELINES = ("torch_1f1b", "torch_gpipe")
"""Baselines with pipeline parallelism alone."""


def parse_baselines(text: str, known: tuple[str, ...] = BASELINES) -> tuple[str, ...]:
    """The names in `text`: names joined by commas, all or none. UsageError for one that is not `known`."""
    if text in ("all", "none"):
        return known if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UsageError(f"--peers: unknown peer {name!r}; known are {', '.join(known)}, or say all or none")
    return names


class _TensorParallel(nn.Module):
    """A layer of timed blocks under torch's tensor parallelism: [B, S, H] -> [B, S, H]."""

    def __init__(self, blocks: list[TimedBlock], group: ProcessGroup | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        if group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            self._mesh: DeviceMesh | None = DeviceMesh.from_group(group, "cpu")
        else:
            self._mesh = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, TimedBlock)
            x = block.combine(x, self._summed(block, x))
        return x

    def _summed(self, block: TimedBlock, x: Tensor) -> Tensor:
        if self._mesh is None:
            return block.partial(x)
        from torch.distributed.tensor import DTensor, Partial, Replicate

        whole = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        y = block.partial(whole.to_local(grad_placements=[Partial()]))
        share = DTensor.from_local(y, self._mesh, [Partial()], run_check=False)
        return share.redistribute(placements=[Replicate()]).to_local()


class _StageModule(nn.Module):
    """The layers of one stage."""

    def __init__(self, layers: list[_TensorParallel], again: int, first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._again, self._first = again, first

    def forward(self, x: Tensor) -> Tensor:
        if self._first:
            x = x.detach().requires_grad_()  # as an embedding's output does
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number < self._again else layer(x)
        return x


class TorchPipeline:
    """A schedule of torch.distributed.pipelining on this rank, which is a stage.

    module: the stage's. data: its replicas, over which torch's DDP averages; None for one. stage, stages: which of
    how many. many: micro-batches. x: the first stage's input, of all of them. group: of the stages. gpipe: its
    schedule in place of 1F1B.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int,
        stages: int,
        many: int,
        x: Tensor,
        group: ProcessGroup | None,
        data: ProcessGroup | None = None,
        gpipe: bool = False,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
        from torch.nn.parallel import DistributedDataParallel

        self.module = module
        if data is not None and data.size() > 1:
            module = DistributedDataParallel(module, process_group=data)
        self._is_first, self._is_last, self._many, self._x = stage == 0, stage == stages - 1, many, x
        assert group_rank(group) == stage
        loss: Callable[[Tensor, Tensor], Tensor] = lambda y, _: y.mean()  # noqa: E731
        schedule = ScheduleGPipe if gpipe else Schedule1F1B
        self._schedule = schedule(
            PipelineStage(module, stage, stages, torch.device("cpu"), group=group), many, loss_fn=loss
        )
        self.seconds: list[float] = []

    def backward(self) -> list[Tensor]:
        """The passes of a step; the losses on the last stage, each its share."""
        losses: list[Tensor] = []
        given = (self._x,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*given, target=self._x, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*given, return_outputs=False)
        return [loss.detach() / self._many for loss in losses]

    def step(self) -> None:
        """One step, timed as ours."""
        self.seconds.append(timed_step(self.backward))
        self.module.zero_grad()

    def warm_up(self) -> None:
        """A step that does not count."""
        self.step()
        self.seconds.clear()

    def row(self) -> dict[str, Any]:
        """Result row."""
        return {"step_seconds": statistics.median(self.seconds), "steps": self.seconds}


def stage_of_blocks(blocks: list[TimedBlock], again: int, first: bool) -> nn.Module:
    """A stage of layers of two blocks each on one rank; `again`: how many of the layers are computed again."""
    layers = [_TensorParallel(blocks[at : at + 2], None) for at in range(0, len(blocks), 2)]
    return _StageModule(layers, again, first)


class TorchStage(TorchPipeline):
    """torch's Schedule1F1B on this rank, with its tensor and data parallelism.

    plan: one segment per stage, all of one degree; its schedules do not count. pipeline: the group of the ranks with
    this one's place in all stages.
    """

    def __init__(self, plan: Plan, hardware: Hardware, mesh: Mesh, pipeline: ProcessGroup) -> None:
        segment, model = plan.stages[mesh.stage].segments[0], plan.model
        tensor, first = mesh.tensor(segment.tp), plan.parts[mesh.stage].first_block
        blocks = [timed_block(hardware, model, first + number, tensor) for number in range(segment.num_blocks)]
        layers = [_TensorParallel(blocks[at : at + 2], tensor) for at in range(0, len(blocks), 2)]
        self._names = [f"blocks.{first + number}.weight" for number in range(segment.num_blocks)]
        super().__init__(
            _StageModule(layers, segment.recomputed_layers, mesh.stage == 0),
            stage=mesh.stage,
            stages=mesh.num_stages,
            many=plan.micro_batches,
            x=torch.ones(int(plan.samples(segment.tp)) * plan.micro_batches, model.sequence, model.hidden),
            group=pipeline,
            data=mesh.data(segment.tp),
        )

    def gradients(self) -> dict[str, Tensor]:
        """By the name in the whole model."""
        parameters = self.module.parameters()
        return {n: p.grad.clone() for n, p in zip(self._names, parameters, strict=True) if p.grad is not None}
