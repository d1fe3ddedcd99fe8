"""Predicts a plan's step: turns it into a program, with its resharding, its gradients and its optimizer, and runs it.

Embedding and head have the degree of the first segment. Gradients of a block are summed over its replicas once the
last micro-batch's backward pass has made them, under the backward pass of the blocks below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from oases.errors import UsageError
from oases.planner.memory import embedding_segment, head_bytes, stage_parameters, stage_state_bytes
from oases.planner.pieces import Course, StagePieces, course
from oases.planner.plan import BUCKET_BYTES, PLANNED, Plan, Prediction, Segment
from oases.schedule import generate_pipeline
from oases.simulator.engine import run
from oases.simulator.hardware import Hardware
from oases.simulator.lowering import StagePasses, lower, lower_pipeline
from oases.simulator.model import ModelShape
from oases.simulator.program import Compute, Instruction, Program, Start, Wait
from oases.simulator.stack import stack_costs
from oases.simulator.timeline import Timeline

LARGEST_PROGRAM = 2_000
"""Instructions, unless every op is to be seen. In larger programs a pass that repeats is a piece of its own."""
MOST_PIECES = 4_096
"""Stages that are remembered."""
_ADAM_BYTES = 28
"""Moved per fp32 parameter by the optimizer: reads weight, gradient and two moments, writes all but the gradient."""


_AT_THE_END = (-1, -1)
"""In the place of a (segment, block): behind the whole backward pass."""


def _buckets(lane: Sequence[tuple[tuple[int, int], int]]) -> Iterator[tuple[tuple[int, int], int]]:
    """(place, bytes) of each part -> (place that fills it, bytes) of each bucket."""
    used, last = 0, lane[0][0]
    for place, num_bytes in lane:
        if used and used + num_bytes > BUCKET_BYTES:
            yield last, used
            used = 0
        used, last = used + num_bytes, place
    yield last, used


def _require_planned(plan: Plan) -> None:
    if plan.pipeline not in PLANNED:
        raise UsageError(f"plan: pipeline {plan.pipeline!r} is not predicted; known are {', '.join(PLANNED)}")


@dataclass(frozen=True)
class _Lowered:
    """A segment's schedule and the instructions of its passes. behind: where in the backward pass a block is done."""

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    behind: dict[int, int]

    @staticmethod
    def of(
        hardware: Hardware, model: ModelShape, segment: Segment, first: int, samples: float, prefix: str
    ) -> _Lowered:
        """first: the number of the segment's first block, of which only its kind matters."""
        schedule = segment.generated()
        kinds = [model.kind_of(first + b) for b in range(segment.num_blocks)]
        costs = stack_costs(hardware, model, kinds, segment.tp, samples, schedule)
        forward, backward = lower(schedule, costs, prefix)
        ahead = len(backward) - len(schedule.backward)
        last = {op.block: ahead + at for at, op in enumerate(schedule.backward) if op.kind in ("BC", "B", "W")}
        return _Lowered(tuple(forward), tuple(backward), {at: block for block, at in last.items()})


class Predictor:
    """Predicts plans on one cluster. stack_only: without embedding, head and optimizer."""

    def __init__(self, hardware: Hardware, *, stack_only: bool = False) -> None:
        self.hardware = hardware
        self.stack_only = stack_only
        # Plans that a search compares differ in few segments.
        self.lowered = lru_cache(maxsize=512)(partial(_Lowered.of, hardware))
        self.contention = {name: hardware.link(name).contention for name in ("node", "cluster")}
        self._pieces: dict[tuple[Any, ...], StagePieces] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Seconds of a step, what of them is exposed communication and bubble, and peak memory by stage."""
        found = self.course(plan)
        bubbles = max(found.bubbles) if len(plan.stages) > 1 else 0.0
        return Prediction(found.seconds, max(found.exposed), bubbles, found.peak_bytes)

    def course(self, plan: Plan) -> Course:
        """How the step goes, stage by stage."""
        _require_planned(plan)
        stages = range(len(plan.stages))
        if plan.micro_batches > 1:
            return course(plan.pipeline, plan.micro_batches, [self.pieces(plan, number) for number in stages])
        timeline = self.timeline(plan)
        return Course(
            timeline.total_seconds, tuple(map(timeline.exposed, stages)), tuple(map(timeline.bubble, stages)),
            tuple(map(timeline.peak_bytes, stages)),
        )  # fmt: skip

    def pieces(self, plan: Plan, number: int) -> StagePieces:
        """The passes of a stage, simulated once for all stages that are alike."""
        stage = _StageModel(self, plan, number, told_apart=False)
        if stage.key not in self._pieces:
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            self._pieces[stage.key] = stage.pieces()
        return self._pieces[stage.key]

    def with_prediction(self, plan: Plan) -> Plan:
        """The plan with what is predicted of it."""
        return replace(plan, prediction=self.predict(plan))

    def timeline(self, plan: Plan, *, every_op: bool = False) -> Timeline:
        """One optimizer step, a rank of each stage."""
        timeline = run(self.program(plan, every_op=every_op))
        return replace(timeline, who="stage") if len(plan.stages) > 1 else timeline

    def program(self, plan: Plan, *, every_op: bool = False) -> Program:
        """The instructions of one optimizer step."""
        _require_planned(plan)
        pipeline = generate_pipeline(plan.pipeline, len(plan.stages), plan.micro_batches, recompute=False)
        ops = (
            8
            * plan.model.num_blocks
            * plan.micro_batches
            * max(s.sub_batches for p in plan.stages for s in p.segments)
        )
        pieces = plan.micro_batches > 1 and not every_op and ops > LARGEST_PROGRAM
        stages = [_StageModel(self, plan, number, told_apart=not pieces) for number in range(len(plan.stages))]
        passes = [stage.passes(pieces=pieces) for stage in stages]
        ranks = lower_pipeline(pipeline, passes)
        return Program(
            plan.text(),
            tuple((*rank, *stage.finish()) for rank, stage in zip(ranks, stages, strict=True)),
            self.contention,
            tuple(stage_state_bytes(plan, number) for number in range(len(plan.stages))),
        )


class _StageModel:
    """The instructions of one stage of a plan."""

    def __init__(self, predictor: Predictor, plan: Plan, number: int, *, told_apart: bool) -> None:
        """told_apart: the micro-batches' instructions have names of their own."""
        self.predictor = predictor
        self.hardware = predictor.hardware
        self.told_apart = told_apart and plan.micro_batches > 1
        self.plan = plan
        self.number = number
        self.model = plan.model
        self.with_ends = not predictor.stack_only
        self.first_block = sum(stage.num_blocks for stage in plan.stages[:number])
        self.segments = plan.stages[number].segments
        self.is_first, self.is_last = number == 0, number == len(plan.stages) - 1
        self.last = 0 if plan.pipeline == "gpipe" else plan.micro_batches - 1

    def passes(self, *, pieces: bool) -> StagePasses:
        """pieces: every pass but the last backward pass as one piece, as a simulation of it alone says."""
        seconds = self._message_seconds()
        if not pieces:
            return StagePasses(self.forward, self.backward, message_seconds=seconds)
        found = self.predictor.pieces(self.plan, self.number)
        forward, backward = found.forward, found.backward
        return StagePasses(
            lambda m: forward.instructions(f"F {self.number}.{m}", forward.kept, 0),
            lambda m: (
                self.backward(m)
                if m == self.last
                else backward.instructions(f"B {self.number}.{m}", backward.kept, backward.peak)
            ),
            message_seconds=seconds,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """All that the stage's passes depend on."""
        plan = self.plan
        return (
            self.model, self.segments, self.first_block % 2, self.is_first, self.is_last, len(plan.stages) > 1,
            plan.stage_ranks, plan.global_batch / plan.micro_batches, plan.zero, embedding_segment(plan).tp,
        )  # fmt: skip

    def pieces(self) -> StagePieces:
        """The passes, each simulated alone."""
        return StagePieces.of(
            self.predictor.contention, self.forward(0), self._backward(0, gradients=False),
            self._backward(0, gradients=True), list(self.finish()), self._message_seconds(),
            stage_state_bytes(self.plan, self.number),
        )  # fmt: skip

    def _message_seconds(self) -> float:
        tp = self.segments[-1].tp
        num_bytes = self.model.unit_bytes(self.plan.samples(tp))
        stride = self.plan.stage_ranks
        # All ranks of a stage hold the same activations of their group and could each send all of them.
        return self.hardware.collective_seconds("send", 2, num_bytes, stride) if len(self.plan.stages) > 1 else 0.0

    def _lowered(self, index: int, m: int) -> _Lowered:
        segment = self.segments[index]
        kind = (self.first_block + sum(earlier.num_blocks for earlier in self.segments[:index])) % 2
        samples = self.plan.samples(segment.tp)
        return self.predictor.lowered(self.model, segment, kind, samples, f"{self._prefix(m)}segment {index} ")

    def _prefix(self, m: int) -> str:
        return f"micro-batch {m} " if self.told_apart else ""

    def forward(self, m: int) -> list[Instruction]:
        """Of one micro-batch."""
        ops: list[Instruction] = []
        if self.is_first and self.with_ends:
            ops += self._embedding(m)
        for index, segment in enumerate(self.segments):
            if index:
                ops += self._resharded(f"{self._prefix(m)}{index}", self.segments[index - 1].tp, segment.tp)
            ops += self._lowered(index, m).forward
        if self.is_last and self.with_ends:
            last, own = self.segments[-1].tp, embedding_segment(self.plan).tp
            ops += self._resharded(f"{self._prefix(m)}head", last, own)
            ops += self._head(m, "head forward", 1)
        return ops

    def backward(self, m: int) -> list[Instruction]:
        """Of one micro-batch; the last one to run starts the sums of the gradients."""
        return self._backward(m, gradients=m == self.last)

    def _backward(self, m: int, *, gradients: bool) -> list[Instruction]:
        ops: list[Instruction] = []
        starts = self._gradient_starts() if gradients else {}
        if self.is_last and self.with_ends:
            ops += self._head(m, "head backward", 2)
            last, own = self.segments[-1].tp, embedding_segment(self.plan).tp
            ops += self._resharded(f"{self._prefix(m)}head backward", own, last)
        for index in reversed(range(len(self.segments))):
            lowered = self._lowered(index, m)
            ops += self._with_gradients(index, lowered, starts) if gradients else lowered.backward
            if index:
                degrees = self.segments[index].tp, self.segments[index - 1].tp
                ops += self._resharded(f"{self._prefix(m)}backward {index}", *degrees)
        return ops

    def finish(self) -> Iterator[Instruction]:
        """After the last micro-batch: the sums of gradients, and the optimizer."""
        starts = self._gradient_starts()
        yield from starts.get(_AT_THE_END, ())
        yield from (Wait(start.name) for lane in starts.values() for start in lane)
        if not self.with_ends:
            return
        for part, (parameters, replicas) in enumerate(stage_parameters(self.plan, self.number)):
            rate = self.hardware.device.bytes_per_second
            mine = parameters // replicas if self.plan.zero else parameters
            yield Compute(f"optimizer {part}", _ADAM_BYTES * mine / rate)
            if self.plan.zero and replicas > 1:
                num_bytes, stride = parameters * self.model.element_bytes, self.plan.stage_ranks // replicas
                seconds = self.hardware.collective_seconds("all_gather", replicas, num_bytes, stride)
                yield from self._exposed(f"parameters {part}", self.hardware.link_of(replicas, stride), seconds)

    def _with_gradients(
        self, index: int, lowered: _Lowered, starts: Mapping[tuple[int, int], list[Start]]
    ) -> Iterator[Instruction]:
        """The backward pass of a segment, with sums over the replicas started behind what makes the last of them."""
        for at, instruction in enumerate(lowered.backward):
            yield instruction
            yield from starts.get((index, lowered.behind.get(at, -1)), ())

    def _gradient_starts(self) -> dict[tuple[int, int], list[Start]]:
        """The sums of gradients, in buckets, by the (segment, block) whose gradients fill each.

        Segments of one degree fill their buckets together, from the last block to the first; behind them comes the
        embedding, in the lane of its degree.
        """
        lanes: dict[int, list[tuple[tuple[int, int], int]]] = {}
        for index in reversed(range(len(self.segments))):
            segment = self.segments[index]
            first = self.first_block + sum(earlier.num_blocks for earlier in self.segments[:index])
            for block in reversed(range(segment.num_blocks)):
                size = self.model.block_parameters(self.model.kind_of(first + block), segment.tp)
                lanes.setdefault(segment.tp, []).append(((index, block), size * self.model.element_bytes))
        if self.with_ends and (self.is_first or self.is_last):
            tp = embedding_segment(self.plan).tp
            size = self.model.embedding_parameters(tp) * self.model.element_bytes
            lanes.setdefault(tp, []).append((_AT_THE_END, size))
        starts: dict[tuple[int, int], list[Start]] = {}
        for tp, lane in lanes.items():
            replicas = self.plan.stage_ranks // tp
            if replicas == 1:
                continue
            link = self.hardware.link_of(replicas, tp)
            for number, (place, num_bytes) in enumerate(_buckets(lane)):
                seconds = self.hardware.collective_seconds("all_reduce", replicas, num_bytes, tp)
                starts.setdefault(place, []).append(Start(f"gradients tp {tp} bucket {number}", link, seconds))
        return starts

    def _resharded(self, name: str, before: int, after: int) -> Iterator[Instruction]:
        """Where the degree grows, ranks gather the samples of the replicas that become one; else they keep a part."""
        if after <= before:
            return
        num_bytes = self.model.unit_bytes(self.plan.samples(after))
        seconds = self.hardware.collective_seconds("all_gather", after // before, num_bytes, before)
        yield from self._exposed(f"reshard {name}", self.hardware.link_of(after // before, before), seconds)

    def _exposed(self, name: str, link: str, seconds: float) -> Iterator[Instruction]:
        if seconds:
            yield Start(name, link, seconds)
            yield Wait(name)

    def _embedding(self, m: int) -> Iterator[Instruction]:
        tp = embedding_segment(self.plan).tp
        unit = self.model.unit_bytes(self.plan.samples(tp))
        table = self.model.vocabulary * self.model.hidden * self.model.element_bytes
        yield Compute(f"{self._prefix(m)}embedding", 3 * unit / self.hardware.device.bytes_per_second)
        seconds = self.hardware.collective_seconds("all_reduce", tp, min(unit, table))
        yield from self._exposed(f"{self._prefix(m)}embedding", self.hardware.link_of(tp), seconds)

    def _head(self, m: int, name: str, products: int) -> Iterator[Instruction]:
        """Logits and loss, or their backward pass: two products and the sum of the input's gradient."""
        model, device = self.model, self.hardware.device
        tp = embedding_segment(self.plan).tp
        samples = self.plan.samples(tp)
        flops = 2.0 * samples * model.sequence * model.hidden * model.vocabulary / tp
        rate = device.rate(model.dtype)
        held = head_bytes(model, tp, samples)
        seconds = products * flops / rate + held / device.bytes_per_second
        allocates, frees = (held, 0) if products == 1 else (0, held)
        yield Compute(f"{self._prefix(m)}{name}", seconds, allocates, frees)
        if products == 2:
            seconds = self.hardware.collective_seconds("all_reduce", tp, model.unit_bytes(samples))
            yield from self._exposed(f"{self._prefix(m)}{name}", self.hardware.link_of(tp), seconds)
