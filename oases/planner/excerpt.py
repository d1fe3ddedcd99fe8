"""What of a plan's step a picture can show: every op, or passes as one piece each, or fewer micro-batches."""

from __future__ import annotations

from dataclasses import replace

from oases.planner.predict import LARGEST_PROGRAM, Predictor
from oases.plans.plan import Plan
from oases.simulator.timeline import Timeline

_OPS = 10
"""Spans of one block and one sub-batch, both passes, about."""
_PASSES = 6
"""Spans of one micro-batch on one stage, both passes as pieces, with messages and waits."""


def excerpt(predictor: Predictor, plan: Plan, most_spans: int) -> tuple[Timeline, str]:
    """A timeline of about `most_spans` spans at most, and in words what was left out; "" where nothing was."""
    if _every_op(plan) <= most_spans:
        return predictor.timeline(plan, every_op=True), ""
    if len(plan.stages) == 1:
        shown = _fitting(plan, most_spans // max(1, _every_op(plan) // plan.micro_batches))
        return predictor.timeline(shown, every_op=True), _left_out(plan, shown)
    last = sum(_of_stage(plan, number) for number in range(len(plan.stages))) // 2
    shown = _fitting(plan, max(0, most_spans - last) // (_PASSES * len(plan.stages)))
    pieces = shown.micro_batches > 1 and _every_op(shown) > LARGEST_PROGRAM
    how = "passes are drawn as one piece each, all but the last backward pass" if pieces else ""
    return predictor.timeline(shown), "; ".join(filter(None, [_left_out(plan, shown), how]))


def _of_stage(plan: Plan, number: int) -> int:
    return sum(_OPS * segment.num_blocks * segment.sub_batches for segment in plan.stages[number].segments)


def _every_op(plan: Plan) -> int:
    return plan.micro_batches * sum(_of_stage(plan, number) for number in range(len(plan.stages)))


def _fitting(plan: Plan, micro_batches: int) -> Plan:
    """The plan with so many micro-batches at most, of the same size, and two at least."""
    count = min(plan.micro_batches, max(2, micro_batches))
    samples = plan.global_batch // plan.micro_batches
    return replace(plan, micro_batches=count, global_batch=count * samples, prediction=None)


def _left_out(plan: Plan, shown: Plan) -> str:
    if shown.micro_batches == plan.micro_batches:
        return ""
    return f"a step of {shown.micro_batches} of the {plan.micro_batches} micro-batches is drawn"
