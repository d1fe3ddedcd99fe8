"""Predicts a plan's step: turns it into a program and runs it, or strings its passes together as pieces."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from oases.planner.memory import stage_state_bytes
from oases.planner.passes import Lowered, StageModel
from oases.planner.pieces import OPTIMIZER, Course, StagePieces, course, peak_bytes
from oases.plans.plan import Plan, Prediction
from oases.schedule.pipeline import resolve_pipeline
from oases.simulator.engine import run
from oases.simulator.hardware import Hardware
from oases.simulator.lowering import lower
from oases.simulator.program import Program
from oases.simulator.timeline import Timeline

LARGEST_PROGRAM = 2_000
"""Instructions, unless every op is to be seen. In larger programs a pass that repeats is a piece of its own."""
MOST_PIECES = 4_096
"""Stages that are remembered."""


class Predictor:
    """Predicts plans on one cluster. stack_only: without embedding, head and optimizer."""

    def __init__(self, hardware: Hardware, *, stack_only: bool = False) -> None:
        self.hardware = hardware
        self.stack_only = stack_only
        # Plans that a search compares differ in few segments.
        self.lowered = lru_cache(maxsize=512)(partial(Lowered.of, hardware))
        self.contention = {name: hardware.link(name).contention for name in ("node", "cluster")}
        self._pieces: dict[tuple[Any, ...], StagePieces] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Seconds of a step, what of them is exposed communication and bubble, and peak memory by stage."""
        found = self.course(plan)
        bubbles = max(found.bubbles) if len(plan.stages) > 1 else 0.0
        return Prediction(found.seconds, max(found.exposed), bubbles, found.peak_bytes, max(found.optimizer))

    def course(self, plan: Plan) -> Course:
        """How the step goes, stage by stage."""
        stages = range(len(plan.stages))
        if plan.micro_batches > 1:
            return course(plan.pipeline, plan.micro_batches, [self.pieces(plan, number) for number in stages])
        timeline = self.timeline(plan)
        return Course(
            timeline.total_seconds, tuple(map(timeline.exposed, stages)), tuple(map(timeline.bubble, stages)),
            tuple(map(timeline.peak_bytes, stages)), tuple(_optimizer(timeline, number) for number in stages),
        )  # fmt: skip

    def pieces(self, plan: Plan, number: int) -> StagePieces:
        """The passes of a stage, simulated once for all stages that are alike."""
        stage = self._stage(plan, number, told_apart=False)
        key = stage.key
        if key not in self._pieces:
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            self._pieces[key] = stage.pieces(self.contention)
        return self._pieces[key]

    def peak_bytes(self, plan: Plan, number: int) -> int:
        """Most bytes that a stage holds, which no other stage has a say in."""
        pieces = self.pieces(plan, number)
        return peak_bytes(plan.pipeline, plan.micro_batches, len(plan.stages), number, pieces)

    def _stage(self, plan: Plan, number: int, *, told_apart: bool) -> StageModel:
        return StageModel(
            plan, number, self.hardware, self.lowered, with_ends=not self.stack_only, told_apart=told_apart
        )

    def with_prediction(self, plan: Plan) -> Plan:
        """The plan with what is predicted of it."""
        return replace(plan, prediction=self.predict(plan))

    def timeline(self, plan: Plan, *, every_op: bool = False) -> Timeline:
        """One optimizer step, a rank of each stage."""
        timeline = run(self.program(plan, every_op=every_op))
        return replace(timeline, who="stage") if len(plan.stages) > 1 else timeline

    def program(self, plan: Plan, *, every_op: bool = False) -> Program:
        """The instructions of one optimizer step."""
        pipeline = resolve_pipeline(plan.pipeline, len(plan.stages), plan.micro_batches)
        ops = (
            8
            * plan.model.num_blocks
            * plan.micro_batches
            * max(s.sub_batches for p in plan.stages for s in p.segments)
        )
        pieces = plan.micro_batches > 1 and not every_op and ops > LARGEST_PROGRAM
        stages = [self._stage(plan, number, told_apart=not pieces) for number in range(len(plan.stages))]
        passes = [
            stages[part.number % len(stages)].passes(
                part, self.pieces(plan, part.number % len(stages)) if pieces else None
            )
            for part in plan.parts
        ]
        ranks = lower(pipeline, passes)
        return Program(
            plan.text(),
            tuple(
                (*(step.instruction for step in rank), *stage.finish())
                for rank, stage in zip(ranks, stages, strict=True)
            ),
            self.contention,
            tuple(stage_state_bytes(plan, number) for number in range(len(plan.stages))),
        )


def _optimizer(timeline: Timeline, rank: int) -> float:
    """Seconds in which a rank's optimizer computes."""
    return sum(span.seconds for span in timeline.spans if span.rank == rank and span.name.startswith(OPTIMIZER))
