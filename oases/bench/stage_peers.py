"""Other people's pipelines, as contestants: torch.distributed.pipelining over torch's tensor and data parallelism.

Stages hold the same timed blocks as ours, as many of them. Tensor parallelism is what ColwiseParallel and
RowwiseParallel make of a block: a replicated DTensor whose gradient is a partial sum goes in, a partial sum comes
out, and both are redistributed: all-reduced. Recomputation is torch's checkpoint around each layer, sums included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oases.bench.plans import timed_block
from oases.bench.stages import timed_step
from oases.errors import UsageError
from oases.models.timed import TimedBlock
from oases.parallel.group import ProcessGroup, group_rank
from oases.parallel.mesh import Mesh
from oases.planner.plan import Plan
from oases.simulator.hardware import Hardware

PEERS = ("torch",)


def parse_peers(text: str) -> tuple[str, ...]:
    """The names in `text`: names joined by commas, all or none. UsageError for one that is unknown."""
    if text in ("all", "none"):
        return PEERS if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--peers: unknown peer {name!r}; known are {', '.join(PEERS)}, or say all or none")
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


class StagePeer:
    """torch's Schedule1F1B on this rank.

    plan: one segment per stage, all of one degree; its schedules do not count. pipeline: the group of the ranks with
    this one's place in all stages.
    """

    def __init__(self, plan: Plan, hardware: Hardware, mesh: Mesh, pipeline: ProcessGroup) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        from torch.nn.parallel import DistributedDataParallel

        segment, model = plan.stages[mesh.stage].segments[0], plan.model
        tensor, first = mesh.tensor(segment.tp), plan.parts[mesh.stage].first_block
        blocks = [timed_block(hardware, model, first + number, tensor) for number in range(segment.num_blocks)]
        layers = [_TensorParallel(blocks[at : at + 2], tensor) for at in range(0, len(blocks), 2)]
        self._module: nn.Module = _StageModule(layers, segment.recomputed_layers, mesh.stage == 0)
        self._names = [f"blocks.{first + number}.weight" for number in range(segment.num_blocks)]
        module: nn.Module = self._module
        data = mesh.data(segment.tp)
        if data is not None and data.size() > 1:
            module = DistributedDataParallel(module, process_group=data)
        self._mesh, self._many, self._last = mesh, plan.micro_batches, mesh.stage == mesh.num_stages - 1
        samples = int(plan.samples(segment.tp))
        self._x = torch.ones(samples * self._many, model.sequence, model.hidden)
        assert group_rank(pipeline) == mesh.stage
        stage = PipelineStage(module, mesh.stage, mesh.num_stages, torch.device("cpu"), group=pipeline)
        loss: Callable[[Tensor, Tensor], Tensor] = lambda y, _: y.mean()  # noqa: E731
        self._schedule = Schedule1F1B(stage, self._many, loss_fn=loss)
        self.seconds: list[float] = []

    def backward(self) -> list[Tensor]:
        """The passes of a step; the losses on the last stage, each its share."""
        losses: list[Tensor] = []
        given = (self._x,) if self._mesh.stage == 0 else ()
        if self._last:
            self._schedule.step(*given, target=self._x, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*given, return_outputs=False)
        return [loss.detach() / self._many for loss in losses]

    def gradients(self) -> dict[str, Tensor]:
        """By the name in the whole model."""
        parameters = self._module.parameters()
        return {n: p.grad.clone() for n, p in zip(self._names, parameters, strict=True) if p.grad is not None}

    def step(self) -> None:
        """One step, timed as ours."""
        self.seconds.append(timed_step(self.backward))
        self._module.zero_grad()
