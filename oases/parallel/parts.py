"""A plan's parts: the consecutive blocks that a pipeline stage runs in one pass, and which plans can be run.

With the pipeline `interleaved` a stage has two parts, stage s of p the parts s and s + p of the model, and its
segments are those of the one and then, as many, those of the other. With any other pipeline a stage is a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from oases.errors import UsageError
from oases.plans.plan import Plan
from oases.schedule import Schedule, is_text
from oases.schedule.pipeline import resolve_pipeline

_ANY_NUMBER = ("gpipe",)
"""Pipelines that are what they are with fewer micro-batches than stages, too."""


def pipeline_of(plan: Plan) -> Schedule:
    """What the stages of a plan do in which order; it computes again early where any segment computes again."""
    again = any(segment.recomputed_layers for stage in plan.stages for segment in stage.segments)
    return resolve_pipeline(plan.pipeline, len(plan.stages), plan.micro_batches, again)


def degrees_of(plan: Plan, stage: int) -> set[int]:
    """The tensor-parallel degrees on a stage; on the last one also that of the head, which is the first segment's."""
    found = {segment.tp for segment in plan.stages[stage].segments}
    return found | {plan.stages[0].segments[0].tp} if stage == len(plan.stages) - 1 else found


def require_runnable(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot be executed, ScheduleError for a schedule in it that cannot."""
    stages = len(plan.stages)
    if stages > plan.model.layers:
        raise UsageError(
            f"plan: {stages} stages are more than the {plan.model.layers} layers of the model; give each at least one"
        )
    if plan.micro_batches < stages and plan.pipeline not in _ANY_NUMBER and not is_text(plan.pipeline):
        raise UsageError(
            f"plan: {plan.pipeline} needs as many micro-batches as stages, got {plan.micro_batches} for {stages} "
            "stages; give more, or fewer stages"
        )
    for number, stage in enumerate(plan.stages):
        require_nested(degrees_of(plan, number))
        for segment in stage.segments:
            segment.generated()
    for before, after in itertools.pairwise(plan.parts):
        if stages > 1 and before.last_degree != after.first_degree:
            raise UsageError(
                f"plan: part {before.number} of the pipeline ends with tp {before.last_degree} and part "
                f"{after.number} begins with tp {after.first_degree}; a message goes from rank to rank, so give both "
                "the same"
            )


def require_nested(degrees: Iterable[int]) -> None:
    """Raise UsageError unless of any two tensor-parallel degrees one divides the other."""
    ordered = sorted(set(degrees))
    for smaller, larger in itertools.pairwise(ordered):
        if larger % smaller:
            raise UsageError(
                f"plan: segments of tp {smaller} and tp {larger} do not nest, so no rank's samples could be handed "
                "on whole; take degrees of which one divides the next, such as powers of two"
            )
