"""Explanation of a plan: its best rivals of other kinds, and where each loses time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oases.core.schedule import is_text
from oases.planner.choose import seconds_of
from oases.planner.predict import LARGEST_PROGRAM, Predictor
from oases.planner.recomputation import num_layers, recomputing
from oases.plans.pipelines import name_of
from oases.plans.plan import Plan, Stage
from oases.simulator.hardware import Hardware
from oases.simulator.peaks import peak_flops
from oases.simulator.timeline import Timeline


@dataclass(frozen=True)
class Rival:
    """Alternative to the chosen plan. kind: how it differs. fits: whether it fits in memory."""

    kind: str
    plan: Plan
    fits: bool = True

    def loses(self, chosen: Plan) -> str:
        """Description of where its additional time goes."""
        mine, best = self.plan.prediction, chosen.prediction
        assert mine is not None
        assert best is not None
        parts = {
            "compute": _compute(self.plan) - _compute(chosen),
            "exposed communication": mine.exposed_seconds - best.exposed_seconds,
            "bubbles": mine.bubble_seconds - best.bubble_seconds,
        }
        words = [
            f"{1e3 * abs(seconds):.0f} ms {'more' if seconds > 0 else 'less'} {name}"
            for name, seconds in sorted(parts.items(), key=lambda part: -abs(part[1]))
            if abs(seconds) >= 5e-4 * best.step_seconds
        ]
        needs = "" if self.fits else f"; does not fit: {max(mine.memory_bytes) / 2**30:.1f} GiB"
        return (", ".join(words) or "next to nothing") + needs


def _compute(plan: Plan) -> float:
    found = plan.prediction
    assert found is not None
    return found.step_seconds - found.exposed_seconds - found.bubble_seconds


def rivals(plans: Sequence[Plan], predictor: Predictor, capacity: int) -> list[Rival]:
    """Best plan of every other kind among the ranked `plans`: other degrees, micro-batches, pipelines.

    Also the chosen plan with synchronous tensor parallelism, without recomputation, and with full recomputation.
    """
    chosen = plans[0]
    kinds: dict[str, Rival] = {}
    for plan in plans[1:]:
        kinds.setdefault(_kind(plan, chosen), Rival(_kind(plan, chosen), plan))
    without = predictor.with_prediction(_changed(chosen, schedule="sync", sub_batches=1))
    kinds["the same, synchronous"] = Rival("the same, synchronous", without, _fits(without, capacity))
    if any(segment.recomputed_layers for stage in chosen.stages for segment in stage.segments):
        kept = predictor.with_prediction(_changed(chosen, recomputed_layers=0))
        kinds["the same, nothing recomputed"] = Rival("the same, nothing recomputed", kept, _fits(kept, capacity))
        full = chosen
        for number in range(len(chosen.stages)):
            full = recomputing(full, number, num_layers(chosen, number))
        if full.stages != chosen.stages:
            full = predictor.with_prediction(full)
            kinds["the same, all recomputed"] = Rival("the same, all recomputed", full, _fits(full, capacity))
    return sorted(kinds.values(), key=lambda rival: seconds_of(rival.plan))


def _fits(plan: Plan, capacity: int) -> bool:
    assert plan.prediction is not None
    return max(plan.prediction.memory_bytes) <= capacity


def _changed(plan: Plan, **fields: object) -> Plan:
    stages = tuple(Stage(tuple(replace(segment, **fields) for segment in stage.segments)) for stage in plan.stages)  # type: ignore[arg-type]
    return replace(plan, stages=stages, prediction=None)


def _kind(plan: Plan, chosen: Plan) -> str:
    if len(plan.stages) != len(chosen.stages):
        return f"{len(plan.stages)} stages" if len(plan.stages) > 1 else "no pipeline"
    if plan.pipeline != chosen.pipeline:
        return f"pipeline {name_of(plan.pipeline)}"
    if plan.uniform_tp != chosen.uniform_tp:
        return f"tp {plan.uniform_tp} throughout" if plan.uniform_tp else "mixed degrees"
    if plan.micro_batches != chosen.micro_batches:
        return f"{plan.micro_batches} micro-batches"
    if (plan.zero, plan.fsdp) != (chosen.zero, chosen.fsdp):
        return "sharded weights (FSDP)" if plan.fsdp else "sharded optimizer" if plan.zero else "whole optimizer"
    if plan.wire != chosen.wire:
        return f"sums sent in {plan.wire}" if plan.wire != "none" else "sums sent whole"
    return "other segments"


@dataclass(frozen=True)
class Throughput:
    """Throughput of a predicted plan. exposed, bubble: fractions of the step. utilisation: None without a known
    peak.
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    exposed: float
    bubble: float
    utilisation: float | None


def throughput(plan: Plan, hardware: Hardware) -> Throughput:
    """Throughput of `plan` on `hardware` from its prediction."""
    found = plan.prediction
    assert found is not None, "the plan has no prediction"
    step = found.step_seconds
    peak = peak_flops(hardware.device.name, plan.model.dtype)
    done = plan.model.step_flops(plan.global_batch)
    samples = plan.global_batch / step
    return Throughput(
        step, samples, samples * plan.model.sequence, found.exposed_seconds / step, found.bubble_seconds / step,
        done / (step * plan.world * peak) if peak else None,
    )  # fmt: skip


_OPS = 10
"""Approximate number of spans of one block and one sub-batch, both passes."""
_PASSES = 6
"""Spans of one micro-batch on one stage if each pass is one span, with messages and waits."""


def excerpt(predictor: Predictor, plan: Plan, most_spans: int) -> tuple[Timeline, str]:
    """A timeline of about `most_spans` spans at most, and a note on what was left out ("" for nothing)."""
    if _every_op(plan) <= most_spans:
        return predictor.timeline(plan, every_op=True), ""
    if len(plan.stages) == 1:
        shown = _fitting(plan, most_spans // max(1, _every_op(plan) // plan.micro_batches))
        return predictor.timeline(shown, every_op=True), _left_out(plan, shown)
    last = sum(_of_stage(plan, number) for number in range(len(plan.stages))) // 2
    shown = _fitting(plan, max(0, most_spans - last) // (_PASSES * len(plan.stages)))
    pieces = shown.micro_batches > 1 and _every_op(shown) > LARGEST_PROGRAM
    how = "each pass but the last backward pass is drawn as one span" if pieces else ""
    return predictor.timeline(shown), "; ".join(filter(None, [_left_out(plan, shown), how]))


def _of_stage(plan: Plan, number: int) -> int:
    return sum(_OPS * segment.num_blocks * segment.sub_batches for segment in plan.stages[number].segments)


def _every_op(plan: Plan) -> int:
    return plan.micro_batches * sum(_of_stage(plan, number) for number in range(len(plan.stages)))


def _fitting(plan: Plan, micro_batches: int) -> Plan:
    """The plan with about so many micro-batches of the same size, at least two; a list of passes needs all."""
    if is_text(plan.pipeline):
        return plan
    count, stages = min(plan.micro_batches, max(2, micro_batches)), len(plan.stages)
    if plan.pipeline == "interleaved":
        count = max(stages, count // stages * stages)
    samples = plan.global_batch // plan.micro_batches
    return replace(plan, micro_batches=count, global_batch=count * samples, prediction=None)


def _left_out(plan: Plan, shown: Plan) -> str:
    if shown.micro_batches == plan.micro_batches:
        return ""
    return f"a step of {shown.micro_batches} of the {plan.micro_batches} micro-batches is drawn"
