"""Timing of an unedited model's own blocks, op by op, and of what it computes around its lists of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.autotp import parallelize
from oases.autotp.pipeline.training import loss_in
from oases.core.execution.group import ProcessGroup
from oases.distributed.clock import Clock
from oases.errors import UsageError
from oases.plans.layered import Model
from oases.profile.compute import StackBench
from oases.profile.links import slowest


class LayerBench(StackBench):
    """Bench of an unedited model's own blocks, and of what it computes around its lists of layers.

    model: built, the same on every rank, whose costs `planned` has. inputs: of its forward, with labels, for the most
    samples, `most`. UsageError where its layers cannot be cut or are not those of `planned`.
    """

    def __init__(
        self,
        model: nn.Module,
        planned: Model,
        inputs: Mapping[str, Any],
        group: ProcessGroup,
        iterations: int,
        most: int,
    ) -> None:
        self._model = parallelize(model.train(), mesh=group, schedule="oases")
        self._inputs = dict(inputs)
        runners = [each.runner for each in self._model.oases_partition.layers if each.runner is not None]  # type: ignore[union-attr]
        ends = [*accumulate((len(runner.layers) for runner in runners), initial=0)]
        if ends[-1] != planned.layers or any(
            len(runner.stack.blocks) != planned.first_block(last) - planned.first_block(first)
            for runner, (first, last) in zip(runners, pairwise(ends), strict=True)
        ):
            raise UsageError(
                f"{planned.name}: its {planned.layers} layers do not all run as the planner's blocks; it is planned "
                "by rates, without a profile of its own"
            )
        stacks = [(runner.stack, runner.layer_of) for runner in runners]
        super().__init__(planned, stacks, Clock(next(self._model.parameters()).device), group, iterations, most)
        for number, runner in enumerate(runners):
            runner.run = partial(self.run_stack, number)
            setattr(runner, "called", partial(self._called, number, runner.called))  # noqa: B010

    def update_seconds(self) -> float:
        """Seconds of torch's AdamW for a parameter, of the slowest rank: an update of all of the model's."""
        return update_seconds(list(self._model.parameters()), self.clock, self.iterations)

    def _called(self, number: int, called: Any, index: int, args: Any, kwargs: Any) -> Any:
        if index == 0:
            self.passes_of_step[number].called = self.mark()
        return called(index, args, kwargs)

    def step(self, samples: int) -> list[Any]:
        """See `StackBench`."""
        self._model.zero_grad()
        inputs = {
            name: each[:samples] if isinstance(each, Tensor) and each.dim() else each
            for name, each in self._inputs.items()
        }
        marks = [self.mark()]
        loss = loss_in(self._model(**inputs))
        marks.append(self.mark())
        loss.backward()
        return [*marks, self.mark()]


def update_seconds(parameters: Sequence[nn.Parameter], clock: Clock, iterations: int) -> float:
    """Seconds per parameter of an update of these by torch's AdamW; they do not change."""
    trained = [each for each in parameters if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    for each in trained:
        each.grad = torch.zeros_like(each)
    seconds = median_seconds(clock, optimizer.step, iterations)
    optimizer.zero_grad()
    return seconds / sum(each.numel() for each in trained)


def median_seconds(clock: Clock, work: Callable[[], Any], iterations: int) -> float:
    """Median over iterations of what the slowest rank takes."""
    times = []
    for _ in range(iterations + 1):
        clock.synchronize()
        dist.barrier()
        start = clock.mark()
        work()
        end = clock.mark()
        clock.synchronize()
        times.append(slowest(clock.seconds(start, end)))
    return median(times[1:])
