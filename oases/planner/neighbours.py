"""Plans one small step away from another: a border moved, a segment changed, split or joined to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from oases.errors import UsageError
from oases.planner.search import SettingSearch
from oases.plans.plan import Plan, Segment, Stage


def neighbours(plan: Plan, search: SettingSearch) -> Iterator[Plan]:
    """Each plan that can be, in a fixed order; some more than once."""
    for number, stage in enumerate(plan.stages):
        for segments in _changed(list(stage.segments), search):
            yield from _possible(plan, {number: segments})
        if number + 1 < len(plan.stages) and search.setting.chunks == 1:
            for segments, others in _across(list(stage.segments), list(plan.stages[number + 1].segments)):
                yield from _possible(plan, {number: segments, number + 1: others})


def _possible(plan: Plan, changed: Mapping[int, Sequence[Segment]]) -> Iterator[Plan]:
    """The plan with other segments on these stages, if that is one that can be executed."""
    stages = list(plan.stages)
    for number, segments in changed.items():
        stages[number] = Stage(tuple(segments))
    try:
        found = replace(plan, stages=tuple(stages), prediction=None)
    except UsageError:  # more sub-batches than samples, or no block left: no plan
        return
    if found.hands_on and not any(part.first_block % 2 for part in found.parts):
        yield found


def _across(one: list[Segment], other: list[Segment]) -> Iterator[tuple[list[Segment], list[Segment]]]:
    """A layer handed from a stage to the next, or back."""
    for step in (-2, 2):
        last, first = _moved([one[-1], other[0]], 0, step)
        if last is not one[-1]:
            yield [*one[:-1], last], [first, *other[1:]]


def _changed(segments: list[Segment], search: SettingSearch) -> Iterator[list[Segment]]:
    for at, segment in enumerate(segments):
        for name, count in search.ways(segment.tp):
            yield _with(segments, at, replace(segment, schedule=name, sub_batches=count))
        for tp in search.degrees:
            way = search.run_of((tp, segment.recomputed_layers > 0))
            changed = replace(segment, tp=tp, schedule=way.schedule, sub_batches=way.sub_batches)
            yield _merged(_with(segments, at, changed))
        for layers in (segment.recomputed_layers - 1, segment.recomputed_layers + 1):
            if 0 <= layers <= (segment.num_blocks + 1) // 2 and (layers == 0 or search.space.recompute):
                yield _with(segments, at, replace(segment, recomputed_layers=layers))
        if at + 1 < len(segments):
            for step in (-2, -1, 1, 2):
                yield _moved(segments, at, step)
        for first in range(1, segment.num_blocks):
            # One block of another degree at either end, and beyond it what the search found.
            if first in (1, 2, segment.num_blocks - 2, segment.num_blocks - 1):
                yield from _split(segments, at, first, search)


def _with(segments: list[Segment], at: int, segment: Segment) -> list[Segment]:
    return [*segments[:at], segment, *segments[at + 1 :]]


def _merged(segments: list[Segment]) -> list[Segment]:
    """Neighbours of one degree are one segment."""
    merged = segments[:1]
    for segment in segments[1:]:
        last = merged[-1]
        if last.tp == segment.tp:
            layers = last.recomputed_layers + segment.recomputed_layers
            both = last.num_blocks + segment.num_blocks
            merged[-1] = replace(last, num_blocks=both, recomputed_layers=min(layers, (both + 1) // 2))
        else:
            merged.append(segment)
    return merged


def _moved(segments: list[Segment], at: int, step: int) -> list[Segment]:
    one, other = segments[at], segments[at + 1]
    if one.num_blocks + step < 1 or other.num_blocks - step < 1:
        return segments
    changed = (
        replace(each, num_blocks=count, recomputed_layers=min(each.recomputed_layers, (count + 1) // 2))
        for each, count in ((one, one.num_blocks + step), (other, other.num_blocks - step))
    )
    return [*segments[:at], *changed, *segments[at + 2 :]]


def _split(segments: list[Segment], at: int, first: int, search: SettingSearch) -> Iterator[list[Segment]]:
    segment = segments[at]
    for tp in search.degrees:
        if tp == segment.tp:
            continue
        way = search.run_of((tp, segment.recomputed_layers > 0))
        for mine, length in ((0, first), (1, segment.num_blocks - first)):
            counts = (first, segment.num_blocks - first)
            parts = [
                replace(segment, num_blocks=count, recomputed_layers=min(segment.recomputed_layers, (count + 1) // 2))
                for count in counts
            ]
            parts[mine] = replace(parts[mine], tp=tp, schedule=way.schedule, sub_batches=way.sub_batches)
            assert parts[mine].num_blocks == length
            yield _merged([*segments[:at], *parts, *segments[at + 1 :]])
