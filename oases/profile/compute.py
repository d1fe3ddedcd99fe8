"""Timing of a stack's blocks, op by op, and of its passes outside the ops, without communication."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.core.execution.communication import NullScheduler
from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup
from oases.core.schedule import Op, Schedule, generate, validate
from oases.distributed.clock import Clock
from oases.layers import OverlappedStack
from oases.models.gpt import transformer_blocks
from oases.plans.shape import KINDS
from oases.profile.config import DTYPES, ProfileConfig
from oases.profile.links import median_of_slowest, slowest, slowest_of
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import MeasuredBlock, MeasuredOverhead

OVERHEAD_SUB_BATCHES = (1, 2, 4)
"""Numbers of sub-batches with which passes are timed outside their ops."""
LEAST = 1e-9
"""Lower bound of an op's time in seconds."""


def apart(schedule: Schedule) -> Schedule:
    """The schedule with the backward of C as an op of its own, for timing."""
    ops = [part for op in schedule for part in ([Op("BC", op.block, op.sub_batch), op] if op.kind == "B" else [op])]
    made = replace(schedule, name=f"{schedule.name}, C's backward apart", ops=tuple(ops))
    validate(made)
    return made


class BlockBench:
    """Stack of one degree, timed on one rank. All ranks run at once and share what they share in training.

    group: tensor-parallel group of the blocks; nothing is sent in it.
    """

    def __init__(self, config: ProfileConfig, group: ProcessGroup) -> None:
        self.config = config
        self.tp, self._group = group.size(), group
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
        self.clock = Clock(device)
        blocks = transformer_blocks(config.gpt(config.seed), group)
        self.stack = OverlappedStack(blocks, process_group=group, schedule="oases").to(device, dtype)
        torch.manual_seed(config.seed)
        shape = (config.batch, config.sequence, config.hidden)
        self.x, self.grad = torch.randn(2, *shape, device=device, dtype=dtype)
        self._wall = self._own = 0.0

    def blocks(self, samples: int) -> list[MeasuredBlock]:
        """Both kinds of block with a sub-batch of `samples`: medians of the slowest rank."""
        times: dict[tuple[str, str], list[float]] = {}
        lists = self._lists(samples)
        for iteration in range(self.config.iterations + 1):
            for schedule in lists:  # interleaved, so that disturbances affect all equally
                spans, _, _ = self.step(schedule, samples * schedule.num_sub_batches)
                if iteration > 0:  # the first is a warm-up
                    self._sort(schedule, spans, times)
        names = [item.name for item in fields(BlockTimes)]
        keys = [(kind, name) for kind in KINDS for name in names]
        medians = [max(LEAST, median_of_slowest(times[key], self._group)) for key in keys]
        by_key = dict(zip(keys, slowest_of(medians), strict=True))
        c = self.config
        return [
            MeasuredBlock(
                kind, c.hidden, c.heads, c.sequence, c.dtype, self.tp, float(samples),
                BlockTimes(**{name: by_key[kind, name] for name in names}),
            )
            for kind in KINDS
        ]  # fmt: skip

    def overhead(self, sub_batches: int) -> MeasuredOverhead:
        """Seconds of a step over the whole batch outside its ops."""
        schedule = generate("oases", 2 * self.config.layers, sub_batches)
        passes: tuple[list[float], list[float]] = ([], [])
        for iteration in range(self.config.iterations + 1):
            spans, forward, backward = self.step(schedule, self.config.batch)
            if iteration == 0:
                continue
            if self.clock.holds:  # in training, a pass takes as long as its host
                _, forward, backward = self.step(schedule, self.config.batch, hold=False)
            in_ops = [0.0, 0.0]
            for op, start, end in spans:
                if op.kind != "wait":  # without communication, a wait is the stack's own overhead
                    in_ops[op.in_backward] += self.clock.seconds(start, end)
            passes[0].append(max(0.0, forward - in_ops[0]))
            passes[1].append(max(0.0, backward - in_ops[1]))
        forward, backward = slowest_of([median(passes[0]), median(passes[1])])
        c = self.config
        return MeasuredOverhead(
            c.hidden, c.heads, c.sequence, c.dtype, self.tp, c.layers, float(c.batch), sub_batches, forward, backward
        )

    def core_share(self) -> float:
        """Fraction of a core that the slowest rank had; well below 1, other programs were running.

        On an accelerator it is 1: there the host may be idle.
        """
        return 1.0 if self.x.device.type != "cpu" else -slowest(-self._own / self._wall)

    def step(
        self, schedule: Schedule, samples: int, *, hold: bool = True
    ) -> tuple[list[tuple[Op, Any, Any]], float, float]:
        """Run one forward and backward pass; returns the marks of each op, and the seconds of both passes.

        hold: hold an accelerator until the host has queued a pass, whose ops then take the time that it needs.
        """
        self.stack.run_as(schedule)
        self.stack.zero_grad()
        spans: list[tuple[str, Any, Any]] = []
        x = self.x[:samples].clone().requires_grad_()
        dist.barrier()
        wall, own = time.perf_counter(), time.thread_time()
        forward, backward = (
            (schedule.name, len(schedule.ops), samples, which) if hold else None for which in ("forward", "backward")
        )
        marks = [self._mark()]
        self.clock.hold(forward)
        output: Tensor = self.stack.run(
            x, NullScheduler(allocate_buffers=True), context=Context(spans, self.clock.mark)
        )
        self.clock.queued(forward)
        marks.append(self._mark())
        self.clock.hold(backward)
        output.backward(self.grad[:samples])
        self.clock.queued(backward)
        marks.append(self._mark())
        self.clock.synchronize()
        self._wall += time.perf_counter() - wall
        self._own += time.thread_time() - own
        named = [(op_of(text), start, end) for text, start, end in spans]
        return named, self.clock.seconds(*marks[:2]), self.clock.seconds(*marks[1:])

    def _mark(self) -> Any:
        self.clock.synchronize()
        return self.clock.mark()

    def _lists(self, samples: int) -> list[Schedule]:
        """Schedules in which every variant of every op occurs.

        Two sub-batches alternate, as in training, so that neither finds the other's data in the cache; the largest
        sub-batch runs by itself, as in `sync`.
        """
        blocks, parts = 2 * self.config.layers, 2 if 2 * samples <= self.config.batch else 1
        return [
            apart(generate("oases", blocks, parts)),  # F with kept activations, C, BC, B, W
            generate("oases", blocks, parts, "full"),  # F without kept activations, R without its last matmul
            generate("cross_pass", blocks, parts, "full"),  # R whole, RC
        ]

    def _sort(
        self, schedule: Schedule, spans: Iterable[tuple[Op, Any, Any]], times: dict[tuple[str, str], list[float]]
    ) -> None:
        layers = range(1, self.config.layers - 1) or range(self.config.layers)  # the first and last layer do less
        for op, start, end in spans:
            name = time_of(op, schedule)
            if name is not None and op.block // 2 in layers:
                times.setdefault((KINDS[op.block % 2], name), []).append(self.clock.seconds(start, end))


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
