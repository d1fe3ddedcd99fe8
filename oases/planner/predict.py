"""Predicts the step time and memory of a plan, by simulating every op or from the costs of its passes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from oases.planner.memory import stage_state_bytes
from oases.planner.pass_costs import OPTIMIZER, PipelineTimes, StageCosts, peak_bytes, pipeline_times
from oases.planner.passes import Lowered, StageModel
from oases.plans.pipelines import resolve_pipeline
from oases.plans.plan import Plan, Prediction
from oases.simulator.engine import run
from oases.simulator.hardware import Hardware
from oases.simulator.lowering import lower
from oases.simulator.program import Program
from oases.simulator.timeline import Timeline

LARGEST_PROGRAM = 2_000
"""Instructions of a program. In larger ones a repeated pass is one instruction, unless every op is asked for."""
MAX_STAGES = 4_096
"""Stages whose costs are cached."""


class Predictor:
    """Predicts plans on one cluster. stack_only: without embedding, head and optimizer, and copies of gradients.

    split: the ranks of a tensor-parallel group send a part of each message between stages.
    """

    def __init__(self, hardware: Hardware, *, stack_only: bool = False, split: bool = True) -> None:
        self.hardware = hardware
        self.stack_only, self.split = stack_only, split
        # Cached: plans that a search compares differ in few segments.
        self.lowered = lru_cache(maxsize=512)(partial(Lowered.of, hardware))
        self.contention = {name: hardware.link(name).contention for name in ("node", "cluster")}
        self._costs: dict[tuple[Any, ...], StageCosts] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Seconds of a step, exposed communication and bubble of its busiest stage, and peak memory by stage."""
        found = self.pipeline_times(plan)
        bubble = found.bubbles[found.busiest] if len(plan.stages) > 1 else 0.0
        return Prediction(found.seconds, found.exposed[found.busiest], bubble, found.peak_bytes, max(found.optimizer))

    def pipeline_times(self, plan: Plan) -> PipelineTimes:
        """Times and peak memory of the step, by stage."""
        stages = range(len(plan.stages))
        if plan.micro_batches > 1:
            return pipeline_times(
                plan.pipeline, plan.micro_batches, [self.stage_costs(plan, number) for number in stages]
            )
        timeline = self.timeline(plan)
        return PipelineTimes(
            timeline.total_seconds, tuple(map(timeline.exposed, stages)), tuple(map(timeline.bubble, stages)),
            tuple(map(timeline.peak_bytes, stages)), tuple(_optimizer(timeline, number) for number in stages),
        )  # fmt: skip

    def stage_costs(self, plan: Plan, number: int) -> StageCosts:
        """Costs of a stage's passes; equal stages are simulated once."""
        stage = self._stage(plan, number, distinct_names=False)
        key = stage.key
        if key not in self._costs:
            if len(self._costs) >= MAX_STAGES:
                self._costs.clear()
            self._costs[key] = stage.stage_costs(self.contention)
        return self._costs[key]

    def peak_bytes(self, plan: Plan, number: int) -> int:
        """Peak bytes of a stage, which do not depend on the other stages."""
        stage = self.stage_costs(plan, number)
        return peak_bytes(plan.pipeline, plan.micro_batches, len(plan.stages), number, stage)

    def _stage(self, plan: Plan, number: int, *, distinct_names: bool) -> StageModel:
        return StageModel(
            plan, number, self.hardware, self.lowered, with_ends=not self.stack_only,
            distinct_names=distinct_names, split=self.split,
        )  # fmt: skip

    def with_prediction(self, plan: Plan) -> Plan:
        """The plan with its prediction filled in."""
        return replace(plan, prediction=self.predict(plan))

    def timeline(self, plan: Plan, *, every_op: bool = False) -> Timeline:
        """Timeline of one optimizer step, for one rank of each stage."""
        timeline = run(self.program(plan, every_op=every_op))
        return replace(timeline, who="stage") if len(plan.stages) > 1 else timeline

    def program(self, plan: Plan, *, every_op: bool = False) -> Program:
        """Instructions of one optimizer step, for one rank of each stage."""
        pipeline = resolve_pipeline(plan.pipeline, len(plan.stages), plan.micro_batches)
        ops = (
            8
            * plan.model.num_blocks
            * plan.micro_batches
            * max(s.sub_batches for p in plan.stages for s in p.segments)
        )
        merged = plan.micro_batches > 1 and not every_op and ops > LARGEST_PROGRAM
        stages = [self._stage(plan, number, distinct_names=not merged) for number in range(len(plan.stages))]
        passes = [
            stages[number].passes(part, self.stage_costs(plan, number) if merged else None)
            for number, part in ((plan.stage_of(part.number), part) for part in plan.parts)
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
    """Seconds of optimizer compute on a rank."""
    return sum(span.seconds for span in timeline.spans if span.rank == rank and span.name.startswith(OPTIMIZER))
