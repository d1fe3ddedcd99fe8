"""Checks of a plan before training, and properties of its pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from oases.core.schedule import Schedule, is_text
from oases.core.schedule.pipeline import require_places
from oases.errors import UsageError
from oases.plans.expert_schedules import resolve_experts
from oases.plans.layered import Model
from oases.plans.pipelines import name_of, resolve_pipeline
from oases.plans.plan import AUTO, Plan
from oases.plans.shape import Experts

_ANY_NUMBER = ("gpipe",)
"""Pipelines that also work with fewer micro-batches than stages."""
TRAINABLE = ("float32", "bfloat16")
"""Dtypes of weights and activations that training supports; bfloat16 has float32 master weights."""


def pipeline_of(plan: Plan) -> Schedule:
    """Pipeline schedule of a plan, with early recomputation if any segment recomputes.

    A plan of one stage has a pipeline of one stage, in which each backward pass follows its forward pass.
    """
    recomputed = any(segment.recomputed_layers for stage in plan.stages for segment in stage.segments)
    stages = len(plan.stages)
    name = plan.pipeline if stages > 1 or is_text(plan.pipeline) else "one_f_one_b"
    return resolve_pipeline(name, stages, plan.micro_batches, recomputed)


def degrees_of(plan: Plan, stage: int) -> set[int]:
    """Tensor-parallel degrees on a stage; where the head is with its own, which is the first segment's."""
    found = {segment.tp for segment in plan.stages[stage].segments}
    return found | {plan.stages[0].segments[0].tp} if stage in plan.end_stages else found


def require_micro_batches(of: str, pipeline: str, stages: int, micro_batches: int) -> None:
    """Raise UsageError, which names what it is `of`, for fewer micro-batches than a pipeline by name runs with."""
    if micro_batches < stages and pipeline not in _ANY_NUMBER and not is_text(pipeline):
        raise UsageError(
            f"{of}: {pipeline} needs as many micro-batches as stages, got {micro_batches} for {stages} stages; give "
            "more, or fewer stages"
        )


def check(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot be executed, ScheduleError for a schedule in it that cannot."""
    require_trainable(plan.model)
    stages = len(plan.stages)
    if stages > plan.model.layers:
        raise UsageError(
            f"plan: {stages} stages are more than the {plan.model.layers} layers of the model; give each at least one"
        )
    require_micro_batches("plan", plan.pipeline, stages, plan.micro_batches)
    require_places(name_of(plan.pipeline), len(plan.parts), plan.micro_batches)
    for number in range(stages):
        require_nested(degrees_of(plan, number))
        for first, segment in plan.placed(number):
            if segment.schedule != AUTO:
                segment.generated(plan.model.layer_numbers(first, segment.num_blocks))
    for before, after in itertools.pairwise(plan.parts):
        if stages > 1 and before.last_degree != after.first_degree:
            raise UsageError(
                f"plan: part {before.number} of the pipeline ends with tp {before.last_degree} and part "
                f"{after.number} begins with tp {after.first_degree}; a message goes from rank to rank, so give both "
                "the same"
            )
    if plan.experts is not None:
        _check_experts(plan, plan.experts)
    if plan.model.expert_parallel:
        _check_expert_degree(plan, plan.model.expert_parallel)


def require_trainable(model: Model) -> None:
    """Raise UsageError for a model dtype that training does not support."""
    if model.dtype not in TRAINABLE:
        raise UsageError(
            f"model: dtype {model.dtype} cannot be trained, only {', '.join(TRAINABLE)}; oases simulate predicts it"
        )


def _check_expert_degree(plan: Plan, degree: int) -> None:
    tp = plan.stages[0].segments[0].tp
    if plan.stage_ranks % degree or degree % tp:
        raise UsageError(
            f"plan: expert_parallel {degree} must divide a stage's {plan.stage_ranks} ranks and be a multiple of tp "
            f"{tp}"
        )


def _check_experts(plan: Plan, given: Experts) -> None:
    experts = given.experts
    if experts % plan.stage_ranks:
        fits = ", ".join(str(ranks) for ranks in range(1, experts + 1) if experts % ranks == 0)
        raise UsageError(
            f"plan: {experts} experts do not divide over {plan.stage_ranks} devices; numbers that divide: {fits}"
        )
    for part in plan.parts:
        if part.first_block % 2 or any(segment.num_blocks % 2 for segment in part.segments):
            raise UsageError(
                f"plan: part {part.number} splits a layer, but a layer with experts is one unit; give segments "
                "of an even number of blocks"
            )
        for segment in part.segments:
            made = resolve_experts(given.expert_schedule, segment.num_blocks // 2, segment.recomputed_layers > 0)
            if given.placement != "none" and not made.copies:
                raise UsageError(
                    f"plan: expert schedule {made.name} moves no experts, but placement is {given.placement}; give "
                    "placement none, or another schedule"
                )


def require_nested(degrees: Iterable[int]) -> None:
    """Raise UsageError unless of any two tensor-parallel degrees one divides the other."""
    ordered = sorted(set(degrees))
    for smaller, larger in itertools.pairwise(ordered):
        if larger % smaller:
            raise UsageError(
                f"plan: segments of tp {smaller} and tp {larger} do not nest, so samples cannot be passed "
                "from rank to rank; give degrees of which one divides the next, such as powers of two"
            )
