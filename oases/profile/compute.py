"""Timing of stacks' blocks, op by op, and of passes outside the ops, without communication."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.core.blocks.batch import BlockInputs
from oases.core.execution.communication import NullScheduler
from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup
from oases.core.schedule import Op, Schedule, generate, validate
from oases.distributed.clock import Clock
from oases.layers import OverlappedStack
from oases.models.gpt import transformer_blocks
from oases.plans.gpt import gpt
from oases.plans.layered import Model
from oases.profile.config import DTYPES, ProfileConfig
from oases.profile.links import median_of_slowest, slowest, slowest_of
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import MeasuredBlock, MeasuredOverhead

OVERHEAD_SUB_BATCHES = (1, 2, 4)
"""Numbers of sub-batches with which passes are timed outside their ops."""
LEAST = 1e-9
"""Lower bound of an op's time in seconds."""
_NAMES = tuple(item.name for item in fields(BlockTimes))


def apart(schedule: Schedule) -> Schedule:
    """The schedule with the backward of C as an op of its own, for timing."""
    ops = [part for op in schedule for part in ([Op("BC", op.block, op.sub_batch), op] if op.kind == "B" else [op])]
    made = replace(schedule, name=f"{schedule.name}, C's backward apart", ops=tuple(ops))
    validate(made)
    return made


@dataclass
class Pass:
    """Marks of one stack in a step: when it was called, it returned, and its gradients came."""

    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    called: Any = None
    returned: Any = None
    began: Any = None
    ended: Any = None


class StackBench(ABC):
    """Stacks of one degree, timed on one rank. All ranks run at once and share what they share in training.

    model: whose blocks the stacks run, in order. stacks: each with the layer of each of its blocks. group:
    tensor-parallel group of the blocks; nothing is sent in it. most: samples of the largest step.
    """

    def __init__(
        self, model: Model, stacks: Sequence[tuple[OverlappedStack, Sequence[int]]], clock: Clock,
        group: ProcessGroup, iterations: int, most: int,
    ) -> None:  # fmt: skip
        self.planned, self.stacks, self.clock = model, stacks, clock
        self.tp, self.iterations, self._group, self._most = group.size(), iterations, group, most
        kinds = iter([model.block_name(model.kind_of(block)) for block in range(model.num_blocks)])
        self._names = [[next(kinds) for _ in layer_of] for _, layer_of in stacks]
        self.passes_of_step: list[Pass] = []
        self._held = False
        self._wall = self._own = 0.0

    @abstractmethod
    def step(self, samples: int) -> list[Any]:
        """Run a forward and a backward pass; marks at its start, between both, and at its end."""

    def blocks(self, samples: int, parts: int = 0) -> list[MeasuredBlock]:
        """Every kind of block with a sub-batch of `samples`: medians of the slowest rank.

        parts: sub-batches; 0: two alternate, as in training, so that neither finds the other's data in the cache, and
        the largest sub-batch runs by itself, as in `sync`.
        """
        times: dict[tuple[str, str], list[float]] = {}
        parts = parts or (2 if 2 * samples <= self._most else 1)
        for iteration in range(self.iterations + 1):
            for which in range(3):  # interleaved, so that disturbances affect all equally
                schedules = self._run_as(which, parts)
                self._timed(samples * parts, hold=True)
                if iteration:  # the first is a warm-up
                    self._sort(schedules, times)
        names = dict.fromkeys(name for names in self._names for name in names)
        keys = [(name, op) for name in names for op in _NAMES]
        medians = [max(LEAST, median_of_slowest(times[key], self._group)) for key in keys]
        by_key = dict(zip(keys, slowest_of(medians), strict=True))
        return [self.measured(name, samples, {op: by_key[name, op] for op in _NAMES}) for name in names]

    def passes(self, samples: int, sub_batches: int) -> tuple[list[MeasuredBlock], list[MeasuredOverhead]]:
        """Time passes before, between and after the stacks, and in stacks outside of their ops.

        samples: of the whole batch.
        """
        count = len(self.stacks) + 1
        ends: list[tuple[list[float], list[float]]] = [([], []) for _ in range(count)]
        outside: tuple[list[float], list[float]] = ([], [])
        self._run_as(0, sub_batches)
        for iteration in range(self.iterations + 1):
            marks, made = self._timed(samples, hold=True), self.passes_of_step
            if self.clock.holds:  # in training, a pass takes as long as its host
                marks = self._timed(samples)
            if not iteration:
                continue
            mine = self.passes_of_step
            forward = [marks[0], *(mark for each in mine for mark in (each.called, each.returned)), marks[1]]
            backward = [marks[1], *(mark for each in reversed(mine) for mark in (each.began, each.ended)), marks[2]]
            inside = [0.0, 0.0]
            for which, found in enumerate((forward, backward)):
                for at in range(count):
                    ends[-1 - at if which else at][which].append(self._seconds(found[2 * at : 2 * at + 2]))
                inside[which] = sum(self._seconds(found[2 * at + 1 : 2 * at + 3]) for at in range(count - 1))
            for text, start, end in (span for each in made for span in each.spans):
                op = op_of(text)
                if op.kind != "wait":  # without communication, a wait is the stack's own overhead
                    inside[op.in_backward] -= self.clock.seconds(start, end)
            for which in (0, 1):
                outside[which].append(max(0.0, inside[which]))
        measured = []
        for border, both in zip(self.planned.borders, ends, strict=True):
            seconds = [max(LEAST, each) for each in slowest_of([median(times) for times in both])]
            times = {name: seconds[0] if name.startswith(("forward", "recompute")) else 0.0 for name in _NAMES}
            measured.append(self.measured(self.planned.end_name(border), samples, times | {"backward": seconds[1]}))
        m = self.planned
        taken = slowest_of([median(times) for times in outside])
        shape = m.hidden, m.heads, m.sequence, m.dtype, self.tp
        return measured, [MeasuredOverhead(*shape, m.layers, float(samples), sub_batches, *taken)]

    def core_share(self) -> float:
        """Fraction of a core that the slowest rank had; well below 1, other programs were running.

        On an accelerator it is 1: there the host may be idle.
        """
        return 1.0 if self.clock.device.type != "cpu" else -slowest(-self._own / self._wall)

    def measured(self, name: str, samples: int, times: Mapping[str, float]) -> MeasuredBlock:
        """Times of a block of this name, for a profile."""
        m = self.planned
        shape = m.hidden, m.heads, m.sequence, m.dtype, self.tp
        return MeasuredBlock(name, *shape, float(samples), BlockTimes(**times))

    def _run_as(self, which: int, parts: int) -> list[Schedule]:
        """Have every stack run one of three schedules, in which every variant of every op occurs.

        F with kept activations, C, BC, B, W; F without kept activations, R without its last matmul; R whole, RC.
        """
        found = []
        for stack, layer_of in self.stacks:
            name = "cross_pass" if which == 2 else "oases"
            made = generate(name, len(layer_of), parts, "full" if which else "none", tuple(layer_of))
            found.append(made if which else apart(made))
            stack.run_as(found[-1])
        return found

    def _timed(self, samples: int, *, hold: bool = False) -> list[Any]:
        """One step. hold: hold an accelerator until the host has queued a stack's pass, whose ops then take the time
        that it needs.
        """
        self._held, self.passes_of_step = hold, [Pass() for _ in self.stacks]
        dist.barrier()
        wall, own = time.perf_counter(), time.thread_time()
        marks = self.step(samples)
        self._wall += time.perf_counter() - wall
        self._own += time.thread_time() - own
        return marks

    def run_stack(self, number: int, x: Tensor, inputs: Sequence[BlockInputs] = ()) -> Tensor:
        """Run a stack without communication, and note when its gradients begin and end to be computed."""
        each, stack = self.passes_of_step[number], self.stacks[number][0]
        key = number, x.shape, stack.schedule.name, len(stack.schedule.ops)
        forward, backward = ((*key, which) if self._held else None for which in ("forward", "backward"))

        def began(_: Tensor) -> None:
            each.began = self.mark()
            self.clock.hold(backward)

        def ended(_: Tensor) -> None:
            self.clock.queued(backward)
            each.ended = self.mark()

        x.register_hook(ended)
        self.clock.hold(forward)
        context = Context(each.spans, self.clock.mark)
        y = stack.run(x, NullScheduler(allocate_buffers=True), inputs=inputs, context=context)
        self.clock.queued(forward)
        y.register_hook(began)
        each.returned = self.mark()
        return y

    def mark(self) -> Any:
        """Mark of what the device has done."""
        self.clock.synchronize()
        return self.clock.mark()

    def _seconds(self, marks: Sequence[Any]) -> float:
        return max(0.0, self.clock.seconds(*marks))

    def _sort(self, schedules: Sequence[Schedule], times: dict[tuple[str, str], list[float]]) -> None:
        for each, names, (_, layer_of), schedule in zip(
            self.passes_of_step, self._names, self.stacks, schedules, strict=True
        ):
            layers = max(layer_of) + 1
            inner = range(1, layers - 1) or range(layers)  # the others do less
            known = {names[block] for block, layer in enumerate(layer_of) if layer in inner}
            for text, start, end in each.spans:
                op = op_of(text)
                name = time_of(op, schedule)
                # Of a kind that only the first or the last layer has, that one counts.
                if name is not None and (layer_of[op.block] in inner or names[op.block] not in known):
                    times.setdefault((names[op.block], name), []).append(self.clock.seconds(start, end))


class BlockBench(StackBench):
    """Bench of the built-in GPT's blocks: one stack, without embedding and head."""

    def __init__(self, config: ProfileConfig, group: ProcessGroup) -> None:
        self.config = config
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
        blocks = transformer_blocks(config.gpt(config.seed), group)
        self.stack = OverlappedStack(blocks, process_group=group, schedule="oases").to(device, dtype)
        torch.manual_seed(config.seed)
        shape = (config.batch, config.sequence, config.hidden)
        self.x, self.grad = torch.randn(2, *shape, device=device, dtype=dtype)
        model = gpt(config.hidden, config.layers, config.heads, config.sequence, dtype=config.dtype)
        layer_of = [model.layer_at(block) for block in range(model.num_blocks)]
        super().__init__(model, [(self.stack, layer_of)], Clock(device), group, config.iterations, config.batch)

    def step(self, samples: int) -> list[Any]:
        """See `StackBench`."""
        self.stack.zero_grad()
        x = self.x[:samples].clone().requires_grad_()
        (each,) = self.passes_of_step
        each.called = self.mark()
        self.run_stack(0, x).backward(self.grad[:samples])
        each.ended = self.mark()  # after all gradients of weights
        return [each.called, each.returned, each.ended]


def op_of(text: str) -> Op:
    """Parse an op."""
    head, _, place = text.rpartition(" ")
    kind, _, of = head.partition(" ")
    block, _, sub_batch = place.partition(".")
    return Op(kind, int(block), int(sub_batch), of or None)  # type: ignore[arg-type]


def time_of(op: Op, schedule: Schedule) -> str | None:
    """Field of BlockTimes for the op's time; None for an op that no single field describes."""
    place = (op.block, op.sub_batch)
    if op.kind == "F":
        return "forward_unkept" if ("R", *place) in schedule.recomputed else "forward"
    if op.kind == "R":
        return "recompute_whole" if op in schedule.starts else "recompute"
    if op.kind == "B":
        whole = Op("BC", *place) in schedule.backward_set and Op("W", *place) in schedule.backward_set
        return "backward" if whole else None
    return {"C": "combine", "RC": "combine", "BC": "combine_backward", "W": "weight_gradient"}.get(op.kind)
