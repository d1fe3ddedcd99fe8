"""Other people's pipelines, as contestants: torch.distributed.pipelining.

Stages hold the same timed blocks as ours, as many of them. Recomputation is torch's checkpoint around each layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oases.core.execution.group import ProcessGroup, group_rank
from oases_bench.harness import timed_step
from oases_bench.timed_block import TimedBlock

PIPELINE_BASELINES = ("torch_1f1b", "torch_gpipe")


class _Layer(nn.Module):
    """A layer of timed blocks on one rank: [B, S, H] -> [B, S, H]."""

    def __init__(self, blocks: list[TimedBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, TimedBlock)
            x = block.combine(x, block.partial(x))
        return x


class _StageModule(nn.Module):
    """The layers of one stage, of which the first is computed again."""

    def __init__(self, layers: list[_Layer], first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._first = first

    def forward(self, x: Tensor) -> Tensor:
        if self._first:
            x = x.detach().requires_grad_()  # as an embedding's output does
        for number, layer in enumerate(self.layers):
            x = layer(x) if number else checkpoint(layer, x, use_reentrant=False)
        return x


class TorchPipeline:
    """A schedule of torch.distributed.pipelining on this rank, which is a stage.

    module: the stage's. stage, stages: which of how many. many: micro-batches. x: the first stage's input, of all of
    them. group: of the stages. gpipe: its schedule in place of 1F1B.
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
        gpipe: bool = False,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        self.module = module
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


def stage_of_blocks(blocks: list[TimedBlock], first: bool) -> nn.Module:
    """A stage of layers of two blocks each on one rank, of which the first layer is computed again."""
    return _StageModule([_Layer(blocks[at : at + 2]) for at in range(0, len(blocks), 2)], first)
