"""Choice of a plan: search every setting, refine the best by local search, rank, or report changes that would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush, nsmallest

from oases.errors import UsageError
from oases.planner.memory import usable_bytes
from oases.planner.predict import Predictor
from oases.planner.search import SettingSearch
from oases.planner.space import Setting, Space, only_earlier, settings, variants
from oases.planner.timings import SEQUENCE_GAIN, StackTimings
from oases.plans.layered import Model
from oases.plans.plan import Plan, Segment, Stage
from oases.simulator.hardware import Hardware
from oases.simulator.quantities import bytes_text, count_text


def neighbours(plan: Plan, search: SettingSearch) -> Iterator[Plan]:
    """Plans one step from a plan, in a fixed order; some more than once.

    Other schedules, recomputed layers and, where they mix, degrees of segments; blocks moved between segments.
    """
    for number, stage in enumerate(plan.stages):
        segments = list(stage.segments)
        for at, (first, segment) in enumerate(plan.placed(number)):
            changed = [replace(segment, **way._asdict()) for way in search.ways(segment.tp)]
            most = plan.model.num_layers(first, segment.num_blocks) if search.space.recompute else 0
            again = (segment.recomputed_layers - 1, segment.recomputed_layers + 1)
            changed += [replace(segment, recomputed_layers=layers) for layers in again if 0 <= layers <= most]
            for each in changed:
                yield from _possible(plan, {number: [*segments[:at], each, *segments[at + 1 :]]})
            for other in _mixed(segments, at, search) if plan.model.mixed else ():
                yield from _possible(plan, {number: other})
        if number + 1 < len(plan.stages) and search.setting.chunks == 1:
            yield from _across_border(plan, number)


def _across_border(plan: Plan, before: int) -> Iterator[Plan]:
    """Move a layer from a stage to the next, or back."""
    model, after = plan.model, before + 1
    one, other = list(plan.stages[before].segments), list(plan.stages[after].segments)
    border = plan.layers_of(plan.parts_of(after)[0]).start
    for layer, sign in ((border, 1), (border - 1, -1)):
        moved = sign * (model.first_block(layer + 1) - model.first_block(layer))
        first = model.first_block(border) - one[-1].num_blocks
        sized = [
            _sized(segment, segment.num_blocks + more, model.num_layers(start, segment.num_blocks), step)
            for segment, start, more, step in (
                (one[-1], first, moved, sign), (other[0], model.first_block(border), -moved, -sign),
            )
        ]  # fmt: skip
        yield from _possible(plan, {before: [*one[:-1], sized[0]], after: [sized[1], *other[1:]]})


def _sized(segment: Segment, blocks: int, layers: int, more: int) -> Segment:
    """The segment of `layers` layers with another number of blocks, `more` layers; all recomputed if all were."""
    again = segment.recomputed_layers
    again = again + more if again == layers else min(again, layers + more)
    return replace(segment, num_blocks=blocks, recomputed_layers=max(0, again))


def _mixed(segments: list[Segment], at: int, search: SettingSearch) -> Iterator[list[Segment]]:
    """Segments of a stage of which one has another degree, in all or in part, or blocks of its neighbour."""
    segment = segments[at]

    def of(tp: int, count: int) -> Segment:
        way = search.timing_of((tp, segment.recomputed_layers > 0)).way
        found = _cut(segment, count)
        return found if tp == segment.tp else replace(found, tp=tp, **way._asdict())

    if at + 1 < len(segments):
        other = segments[at + 1]
        for step in (-2, -1, 1, 2):
            moved = [
                replace(each, num_blocks=each.num_blocks + more) for each, more in ((segment, step), (other, -step))
            ]
            if min(each.num_blocks for each in moved) > 0:
                fit = (min(each.recomputed_layers, (each.num_blocks + 1) // 2) for each in moved)
                moved = [replace(each, recomputed_layers=layers) for each, layers in zip(moved, fit, strict=True)]
                yield [*segments[:at], *moved, *segments[at + 2 :]]
    for tp in search.degrees:
        yield _merged([*segments[:at], of(tp, segment.num_blocks), *segments[at + 1 :]])
        # One block of another degree at either end, or a layer.
        for first in sorted({1, 2, segment.num_blocks - 2, segment.num_blocks - 1}):
            for degrees in ((tp, segment.tp), (segment.tp, tp)) if tp != segment.tp and first > 0 else ():
                if (rest := segment.num_blocks - first) > 0:
                    parts = [of(degree, count) for degree, count in zip(degrees, (first, rest), strict=True)]
                    yield _merged([*segments[:at], *parts, *segments[at + 1 :]])


def _cut(segment: Segment, blocks: int) -> Segment:
    """The segment with another number of blocks, and no more layers recomputed than it has."""
    return replace(segment, num_blocks=blocks, recomputed_layers=min(segment.recomputed_layers, (blocks + 1) // 2))


def _merged(segments: list[Segment]) -> list[Segment]:
    """Merge adjacent segments of one degree."""
    merged = segments[:1]
    for segment in segments[1:]:
        last = merged[-1]
        if last.tp == segment.tp:
            layers = last.recomputed_layers + segment.recomputed_layers
            both = last.num_blocks + segment.num_blocks
            merged[-1] = _cut(replace(last, recomputed_layers=layers), both)
        else:
            merged.append(segment)
    return merged


def _possible(plan: Plan, changed: Mapping[int, Sequence[Segment]]) -> Iterator[Plan]:
    """The plan with other segments on these stages, if it can be executed."""
    stages = list(plan.stages)
    for number, segments in changed.items():
        stages[number] = Stage(tuple(segments))
    try:
        found = replace(plan, stages=tuple(stages), prediction=None)
    except UsageError:  # e.g. more sub-batches than samples, or an empty segment
        return
    if found.hands_on and not any(_splits_a_layer(plan.model, part.first_block) for part in found.parts):
        yield found


def _splits_a_layer(model: Model, block: int) -> bool:
    return model.first_block(model.layer_at(block)) != block


class NoPlanError(UsageError):
    """Error for a model that no plan fits in memory. The message names the smallest changes that would make one
    fit.
    """


def refusal(model: Model, hardware: Hardware, space: Space, world: int, global_batch: int, capacity: int) -> str:
    """Message of NoPlanError, with the smallest single changes that would make a plan fit."""

    def needed_by(shape: Model = model, space: Space = space, ranks: int = world, batch: int = global_batch) -> float:
        return _least_bytes(shape, hardware, space, ranks, batch, capacity)

    least = needed_by()
    others = {
        "recomputation (leave out --no-recompute)": (model, replace(space, recompute=True)),
        "a sharded optimizer (leave out --no-zero)": (model, replace(space, zero=(False, True))),
        "sharded weights (leave out --no-fsdp)": (model, replace(space, fsdp=(False, True))),
    }
    if not hardware.blocks and "bfloat16" in hardware.device.flops_per_second:
        others["bfloat16 instead of float32"] = (model.in_dtype("bfloat16"), space)
    changes = [
        change
        for change, (shape, other) in others.items()
        if (shape.element_bytes, other) != (model.element_bytes, space) and needed_by(shape, other) <= capacity
    ]
    for ranks in (world * 2**power for power in range(1, 7)):
        if needed_by(ranks=ranks) <= capacity:
            changes.append(f"{ranks} devices instead of {world}")
            break
    for batch in (global_batch // 2**power for power in range(1, 11)):
        if batch >= 1 and needed_by(batch=batch) <= capacity:
            changes.append(f"a global batch of {batch} instead of {global_batch}")
            break
    unit = 2**30 if least >= 2**30 else 2**20
    needed = bytes_text(least if math.isinf(least) else math.ceil(10 * least / unit) * unit / 10)
    changes.append(f"{needed} per device")
    return (
        f"no plan fits: {model.name} with {count_text(model.num_parameters)} parameters on {world} devices needs at "
        f"least {needed} on each, and {bytes_text(capacity)} may be filled. It would fit with: "
        + "; or ".join(changes)
    )


def _least_bytes(
    model: Model, hardware: Hardware, space: Space, world: int, global_batch: int, capacity: int
) -> float:
    if "one_f_one_b" in space.pipelines:  # the pipeline with the least memory
        space = replace(space, pipelines=("one_f_one_b",))
    try:
        searches = _searches(model, hardware, space, world, global_batch, capacity, Predictor(hardware))
    except UsageError:
        return math.inf
    lightest = nsmallest(3, searches, key=SettingSearch.smallest_bytes)  # what the closed form leaves out differs
    return min(max(each.smallest_bytes(), each.peak_of_lightest()) for each in lightest)


def _searches(
    model: Model,
    hardware: Hardware,
    space: Space,
    world: int,
    global_batch: int,
    capacity: int,
    predictor: Predictor,
) -> list[SettingSearch]:
    """A search for each setting, of the model and of its variants. UsageError where no setting is possible."""
    found: list[SettingSearch] = []
    why: UsageError | None = None
    for variant in variants(model, world, space):
        timings = StackTimings(variant, hardware, space)
        try:
            options = list(settings(variant, hardware, world, global_batch, space))
        except UsageError as error:
            why = why or error
            continue
        found += [SettingSearch(setting, timings, capacity, predictor) for setting in options]
    if found:
        return found
    raise why or UsageError(
        f"expert_parallel {', '.join(map(str, space.expert_parallel))} must divide {world} ranks and the "
        f"{model.num_experts} experts of {model.name}; leave it out"
    )


IMPROVED = 2
"""Number of best plans that are refined by local search."""
STEPS = 3000
"""Local search steps times the model's blocks: a step of a large model gains little and takes long."""
OVER = 1.0
"""Exponent of the memory excess by which a plan that does not fit is ranked lower."""
BORDER = 0.004
"""Minimum relative gain of a change of degree, so that noise in the profile does not fragment the model."""
PRUNED = 1.1
"""Settings whose lower bound exceeds this multiple of the best plan's time are pruned."""


def rank_plans(
    model: Model,
    hardware: Hardware,
    world: int,
    global_batch: int,
    *,
    budget: int | None = None,
    space: Space | None = None,
    predictor: Predictor | None = None,
    on_setting: Callable[[int, int], None] | None = None,
) -> list[Plan]:
    """Plans that fit in memory with their predictions, fastest first.

    world: ranks. global_batch: samples per optimizer step. budget: bytes of memory per rank; None takes the usable
    share of the device. on_setting(done, total): progress callback. Raises NoPlanError if nothing fits, UsageError
    if nothing divides.
    """
    space = space or Space()
    predictor = predictor or Predictor(hardware)
    capacity = usable_bytes(hardware, budget)
    searches = _searches(model, hardware, space, world, global_batch, capacity, predictor)
    searches.sort(key=lambda search: (search.least_seconds(), search.setting.fsdp))
    found: dict[Plan, Plan] = {}
    searched: dict[Plan, SettingSearch] = {}
    best = math.inf
    nothing_again: set[tuple[Model, Setting]] = set()
    for done, search in enumerate(searches, start=1):
        if search.least_seconds() > PRUNED * best:
            break
        setting, of = search.setting, search.model
        alike = only_earlier(setting.pipeline) and (of, replace(setting, pipeline="one_f_one_b")) in nothing_again
        # Sharded weights save memory alone, at the price of their all-gathers.
        alike = alike or (
            setting.fsdp and any((of, replace(setting, fsdp=False, zero=z)) in nothing_again for z in (False, True))
        )
        candidates = [] if alike else list(search.candidates(PRUNED * best))
        for plan in candidates:
            found[replace(plan, prediction=None)] = plan
            searched[replace(plan, prediction=None)] = search
            best = min(best, seconds_of(plan))
        if candidates and not any(s.recomputed_layers for p in candidates for t in p.stages for s in t.segments):
            nothing_again.add((of, setting))
        if on_setting is not None:
            on_setting(done, len(searches))
    if not found:
        raise NoPlanError(refusal(model, hardware, space, world, global_batch, capacity))
    for plan in ranked(found)[:IMPROVED]:
        better = _improved(plan, searched[replace(plan, prediction=None)], predictor, capacity)
        found[replace(better, prediction=None)] = better
    return ranked(found)


def ranked(found: dict[Plan, Plan]) -> list[Plan]:
    """Sort by predicted step time, with the minimum gain per change of degree."""
    return sorted(found.values(), key=_cost)


def _cost(plan: Plan) -> float:
    borders = sum(len(part.segments) - 1 for part in plan.parts)
    along = any(segment.sequence_parallel for stage in plan.stages for segment in stage.segments)
    return seconds_of(plan) * (1 + BORDER) ** borders * (1 + SEQUENCE_GAIN) ** along


def seconds_of(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def _improved(plan: Plan, search: SettingSearch, predictor: Predictor, capacity: int) -> Plan:
    """Best plan reached by local search: borders moved, schedules and degrees of segments changed.

    Continues from the best unvisited plan, even from one that does not fit: the next step may make it fit.
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
