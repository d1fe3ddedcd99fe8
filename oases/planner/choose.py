"""Chooses a plan: searches every setting, improves the best in small steps, ranks them, or says what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from oases.planner.memory import usable_bytes
from oases.planner.neighbours import neighbours
from oases.planner.predict import Predictor
from oases.planner.refusal import NoPlanError, refusal
from oases.planner.runs import Runs
from oases.planner.search import SettingSearch
from oases.planner.space import Setting, Space, only_earlier, settings
from oases.plans.plan import Plan
from oases.plans.shape import ModelShape
from oases.simulator.hardware import Hardware

IMPROVED = 2
"""How many of the best plans are improved in small steps."""
STEPS = 3000
"""Small steps that are tried, divided by the model's blocks: a step of a large model gains little and takes long."""
OVER = 1.0
"""Power of its share of the memory by which a plan that does not fit is put back."""
BORDER = 0.004
"""Share of a step that a change of degree must save, so that noise in the profile does not cut the model up."""
PRUNED = 1.1
"""Settings that take more than this many times the best plan's time at the very least are left out."""


def rank_plans(
    model: ModelShape,
    hardware: Hardware,
    world: int,
    global_batch: int,
    *,
    budget: int | None = None,
    space: Space | None = None,
    predictor: Predictor | None = None,
    on_setting: Callable[[int, int], None] | None = None,
) -> list[Plan]:
    """Plans with their predictions, the fastest first; every one fits.

    world: ranks. global_batch: samples of one optimizer step. budget: bytes that a rank may fill; None takes the
    usable share of the device. on_setting(done, total): called as the search goes on. Raises NoPlanError where
    nothing fits, UsageError where nothing divides.
    """
    space = space or Space()
    predictor = predictor or Predictor(hardware)
    capacity = usable_bytes(hardware, budget)
    runs = Runs(model, hardware, space)
    searches = [
        SettingSearch(setting, runs, capacity, predictor)
        for setting in settings(model, hardware, world, global_batch, space)
    ]
    searches.sort(key=SettingSearch.least_seconds)
    found: dict[Plan, Plan] = {}
    best = math.inf
    nothing_again: set[Setting] = set()
    for done, search in enumerate(searches, start=1):
        if search.least_seconds() > PRUNED * best:
            break
        setting = search.setting
        alike = only_earlier(setting.pipeline) and replace(setting, pipeline="one_f_one_b") in nothing_again
        candidates = [] if alike else list(search.candidates(PRUNED * best))
        for plan in candidates:
            found[replace(plan, prediction=None)] = plan
            best = min(best, seconds_of(plan))
        if candidates and not any(s.recomputed_layers for p in candidates for t in p.stages for s in t.segments):
            nothing_again.add(setting)
        if on_setting is not None:
            on_setting(done, len(searches))
    if not found:
        raise NoPlanError(refusal(runs, world, global_batch, capacity))
    by_setting = {search.setting: search for search in searches}
    for plan in ranked(found)[:IMPROVED]:
        better = _improved(plan, by_setting[_setting_of(plan)], predictor, capacity)
        found[replace(better, prediction=None)] = better
    return ranked(found)


def ranked(found: dict[Plan, Plan]) -> list[Plan]:
    """By predicted time of a step; every border between degrees has to pay for itself."""
    return sorted(found.values(), key=_cost)


def _cost(plan: Plan) -> float:
    borders = sum(len(stage.segments) - 1 for stage in plan.stages)
    return seconds_of(plan) * (1 + BORDER) ** borders


def seconds_of(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def _setting_of(plan: Plan) -> Setting:
    return Setting(plan.world, plan.global_batch, len(plan.stages), plan.micro_batches, plan.zero, plan.pipeline)


def _improved(plan: Plan, search: SettingSearch, predictor: Predictor, capacity: int) -> Plan:
    """The best plan that single steps lead to: borders moved, schedules and degrees of segments changed.

    Steps go on from the best plan that has not been left yet, from one that does not fit as well: what makes it fit
    may be the next step.
    """
    best, tried = plan, {replace(plan, prediction=None)}
    ahead = [(0.0, 0, plan)]
    while ahead:
        _, _, base = heappop(ahead)
        for changed in neighbours(base, search):
            if changed in tried:
                continue
            if len(tried) > STEPS // plan.model.num_blocks:
                return best
            tried.add(changed)
            candidate = predictor.with_prediction(changed)
            assert candidate.prediction is not None
            over = max(1.0, max(candidate.prediction.memory_bytes) / capacity)
            if over == 1.0 and _cost(candidate) < (1 - 1e-4) * _cost(best):
                best = candidate
            heappush(ahead, (_cost(candidate) * over**OVER, len(tried), candidate))
    return best
