"""Timing of an unedited model's own blocks, op by op, and of what it computes around its lists of layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.autotp import parallelize
from oases.autotp.pipeline.training import loss_in
from oases.core.blocks.batch import BlockInputs
from oases.core.execution.communication import NullScheduler
from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup
from oases.core.schedule import Schedule, generate
from oases.distributed.clock import Clock
from oases.errors import UsageError
from oases.plans.layered import Model
from oases.profile.compute import LEAST, apart, op_of, time_of
from oases.profile.links import median_of_slowest, slowest, slowest_of
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import MeasuredBlock, MeasuredOverhead

_NAMES = tuple(item.name for item in fields(BlockTimes))


@dataclass
class _Pass:
    """Marks of one list of layers in a step: when its first layer was called, it returned, and its gradients came."""

    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    called: Any = None
    returned: Any = None
    began: Any = None
    ended: Any = None


class LayerBench:
    """An unedited model of one degree, timed on one rank; nothing is sent between its blocks.

    model: built, the same on every rank, whose costs `layered` has. inputs: of its forward, with labels, for the most
    samples. group: tensor-parallel group. UsageError where its layers cannot be cut or are not those of `layered`.
    """

    def __init__(
        self, model: nn.Module, layered: Model, inputs: Mapping[str, Any], group: ProcessGroup, iterations: int
    ) -> None:
        self.layered, self.tp, self.iterations, self._group = layered, group.size(), iterations, group
        self._model = parallelize(model.train(), mesh=group, schedule="oases")
        self._inputs = dict(inputs)
        self._runners = [each.runner for each in self._model.oases_partition.layers if each.runner is not None]  # type: ignore[union-attr]
        self._passes: list[_Pass] = []
        self.clock = Clock(next(self._model.parameters()).device)
        self._names = self._checked()
        for number, runner in enumerate(self._runners):
            runner.run = partial(self._run, number)
            setattr(runner, "called", partial(self._called, number, runner.called))  # noqa: B010
        self._wall = self._own = 0.0
        self._held = False

    def _checked(self) -> list[list[str]]:
        """Name of each block of each list; of equal costs, the same."""
        layered, first, found = self.layered, 0, []
        for runner in self._runners:
            layers = range(first, first + len(runner.layers))
            found.append(
                [layered.block_name(layered.kind_of(b)) for n in layers for b in _blocks(layered, n)]
                if layers.stop <= layered.layers
                else []
            )
            first = layers.stop
        if first != layered.layers or any(
            len(names) != len(runner.stack.blocks) for names, runner in zip(found, self._runners, strict=True)
        ):
            raise UsageError(
                f"{layered.name}: its {layered.layers} layers do not all run as the planner's blocks; it is planned "
                "by rates, without a profile of its own"
            )
        return found

    def blocks(self, samples: int, parts: int = 1) -> list[MeasuredBlock]:
        """Every kind of block with a sub-batch of `samples`: medians of the slowest rank. parts: sub-batches."""
        times: dict[tuple[str, str], list[float]] = {}
        for iteration in range(self.iterations + 1):
            for which in range(3):
                schedules = self._run_as(which, parts)
                self._step(samples * parts, hold=True)
                if iteration:  # the first is a warm-up
                    self._sort(schedules, times)
        names = dict.fromkeys(name for names in self._names for name in names)
        keys = [(name, op) for name in names for op in _NAMES]
        medians = [max(LEAST, median_of_slowest(times[key], self._group)) for key in keys]
        by_key = dict(zip(keys, slowest_of(medians), strict=True))
        return [self._measured(name, samples, {op: by_key[name, op] for op in _NAMES}) for name in names]

    def passes(self, samples: int, sub_batches: int) -> tuple[list[MeasuredBlock], list[MeasuredOverhead]]:
        """Time passes before, between and after the lists, and in stacks outside of their ops.

        samples: of the whole batch.
        """
        borders = self.layered.borders
        ends: list[tuple[list[float], list[float]]] = [([], []) for _ in borders]
        outside: tuple[list[float], list[float]] = ([], [])
        self._run_as(0, sub_batches)
        for iteration in range(self.iterations + 1):
            spans = self._spans(samples) if self.clock.holds else None
            marks = self._step(samples)
            if not iteration:
                continue
            forward = [marks[0], *(mark for each in self._passes for mark in (each.called, each.returned)), marks[1]]
            backward = [marks[1], *(m for each in reversed(self._passes) for m in (each.began, each.ended)), marks[2]]
            for border in range(len(borders)):
                ends[border][0].append(self._seconds(forward[2 * border : 2 * border + 2]))
                ends[-1 - border][1].append(self._seconds(backward[2 * border : 2 * border + 2]))
            in_ops = [0.0, 0.0]
            for text, start, end in spans or [span for each in self._passes for span in each.spans]:
                in_ops[op_of(text).in_backward] += self.clock.seconds(start, end)
            inside = [
                sum(self._seconds(pair) for pair in pairs)
                for pairs in (
                    [(each.called, each.returned) for each in self._passes],
                    [(each.began, each.ended) for each in self._passes],
                )
            ]
            for which in (0, 1):
                outside[which].append(max(0.0, inside[which] - in_ops[which]))
        found = []
        for border, both in zip(borders, ends, strict=True):
            seconds = [max(LEAST, each) for each in slowest_of([median(times) for times in both])]
            times = {name: seconds[0] if name.startswith(("forward", "recompute")) else 0.0 for name in _NAMES}
            name = self.layered.end_name(border)
            found.append(self._measured(name, samples, times | {"backward": seconds[1]}))
        model = self.layered
        taken = slowest_of([median(times) for times in outside])
        return found, [
            MeasuredOverhead(
                model.hidden, model.heads, model.sequence, model.dtype, self.tp, model.layers, float(samples),
                sub_batches, taken[0], taken[1],
            )
        ]  # fmt: skip

    def update_seconds(self) -> float:
        """Seconds of torch's AdamW for a parameter, of the slowest rank: an update of all of the model's."""
        return update_seconds(list(self._model.parameters()), self.clock, self.iterations)

    def core_share(self) -> float:
        """Fraction of a core that the slowest rank had; well below 1, other programs were running."""
        return 1.0 if self.clock.device.type != "cpu" else -slowest(-self._own / self._wall)

    def _measured(self, name: str, samples: int, times: Mapping[str, float]) -> MeasuredBlock:
        m = self.layered
        return MeasuredBlock(
            name, m.hidden, m.heads, m.sequence, m.dtype, self.tp, float(samples), BlockTimes(**times)
        )

    def _run_as(self, which: int, parts: int) -> list[Schedule]:
        """Have every list run one of three schedules, in which every variant of every op occurs (see BlockBench)."""
        found = []
        for runner in self._runners:
            blocks, layer_of = len(runner.stack.blocks), tuple(runner.layer_of)
            made = generate(
                "cross_pass" if which == 2 else "oases", blocks, parts, "full" if which else "none", layer_of
            )
            found.append(made if which else apart(made))
            runner.stack.run_as(found[-1])
        return found

    def _called(self, number: int, called: Any, index: int, args: Any, kwargs: Any) -> Any:
        if index == 0:
            self._passes[number].called = self._mark()
        return called(index, args, kwargs)

    def _run(self, number: int, x: Tensor, inputs: Sequence[BlockInputs]) -> Tensor:
        """Run a list of layers without communication, and note when its gradients begin and end to be computed."""
        each, stack = self._passes[number], self._runners[number].stack
        name = stack.schedule.name, len(stack.schedule.ops)
        forward, backward = (
            (number, x.shape, *name, which) if self._held else None for which in ("forward", "backward")
        )

        def began(_: Tensor) -> None:
            each.began = self._mark()
            self.clock.hold(backward)

        def ended(_: Tensor) -> None:
            self.clock.queued(backward)
            each.ended = self._mark()

        x.register_hook(ended)
        self.clock.hold(forward)
        y = stack.run(
            x, NullScheduler(allocate_buffers=True), inputs=inputs, context=Context(each.spans, self.clock.mark)
        )
        self.clock.queued(forward)
        y.register_hook(began)
        each.returned = self._mark()
        return y

    def _spans(self, samples: int) -> list[tuple[str, Any, Any]]:
        """Marks of the ops of a step on a held accelerator."""
        self._step(samples, hold=True)
        return [span for each in self._passes for span in each.spans]

    def _step(self, samples: int, *, hold: bool = False) -> list[Any]:
        """One forward and backward pass; marks at its start, between both, and at its end.

        hold: hold an accelerator until the host has queued a list's pass, whose ops then take the time that it needs.
        """
        self._held = hold
        self._model.zero_grad()
        self._passes = [_Pass() for _ in self._runners]
        inputs = {
            name: each[:samples] if isinstance(each, Tensor) and each.dim() else each
            for name, each in self._inputs.items()
        }
        dist.barrier()
        wall, own = time.perf_counter(), time.thread_time()
        marks = [self._mark()]
        loss = loss_in(self._model(**inputs))
        marks.append(self._mark())
        loss.backward()
        marks.append(self._mark())
        self._wall += time.perf_counter() - wall
        self._own += time.thread_time() - own
        return marks

    def _mark(self) -> Any:
        self.clock.synchronize()
        return self.clock.mark()

    def _seconds(self, marks: Sequence[Any]) -> float:
        return max(0.0, self.clock.seconds(*marks))

    def _sort(self, schedules: Sequence[Schedule], times: dict[tuple[str, str], list[float]]) -> None:
        for each, names, runner, schedule in zip(self._passes, self._names, self._runners, schedules, strict=True):
            inner = range(1, len(runner.layers) - 1) or range(len(runner.layers))  # the others do less
            known = {names[block] for block, layer in enumerate(runner.layer_of) if layer in inner}
            for text, start, end in each.spans:
                op = op_of(text)
                name = time_of(op, schedule)
                # Of a kind that only the first or the last layer has, that one counts.
                if name is not None and (runner.layer_of[op.block] in inner or names[op.block] not in known):
                    times.setdefault((names[op.block], name), []).append(self.clock.seconds(start, end))


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


def _blocks(model: Model, layer: int) -> range:
    return range(model.first_block(layer), model.first_block(layer + 1))
