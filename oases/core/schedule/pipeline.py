"""Pipeline schedules: each stage's ops in issue order, with the messages between stages.

Generators are pure functions of the number of stages and micro-batches. An op's `block` is its model part (the
stage, unless a stage has several), its `sub_batch` the micro-batch. R is an op of its own: before a receive it
fills the time until the gradient arrives.
Source: Merak (arXiv 2206.04959, section 5); interleaved: arXiv 2104.04473; ZB-H1: arXiv 2401.10241; ZB-V:
arXiv 2405.15362.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import Literal

from oases.core.schedule.ops import Op, ScheduleError
from oases.core.schedule.schedule import Placement, Schedule, stage_of
from oases.core.schedule.text import from_text, is_text
from oases.limits import MOST_PLACES

Turn = tuple[Literal["F", "R", "B", "W"], int]
"""A pass and its micro-batch. R: early recomputation; without it a stage recomputes right before B."""
Pass = tuple[Literal["F", "R", "B", "W"], int, int]
"""Pass (F, B, R or W), model part and micro-batch."""


# --- turns of one stage, by the number of stages after it and of micro-batches ---


def _gpipe(ahead: int, many: int) -> Iterator[Turn]:
    yield from (("F", m) for m in range(many))
    yield from (("B", m) for m in reversed(range(many)))


def _one_f_one_b(ahead: int, many: int) -> Iterator[Turn]:
    yield from (("F", m) for m in range(min(ahead, many)))
    for m in range(many):
        if m + ahead < many:
            yield "F", m + ahead
        yield "B", m


def _pre_recompute(ahead: int, many: int) -> Iterator[Turn]:
    """1F1B; in the cooldown, recompute while the gradient is in flight."""
    for kind, m in _one_f_one_b(ahead, many):
        if kind == "B" and m + ahead >= many:
            yield "R", m
        yield kind, m


def _with_early(turns: Iterator[Turn], *early: int) -> Iterator[Turn]:
    """Recompute these micro-batches early as well."""
    for kind, m in turns:
        if kind == "B" and m in early:
            yield "R", m
        yield kind, m


def _last_no_recompute(ahead: int, many: int) -> Iterator[Turn]:
    """The last stage keeps its activations; the one before it is then the first to wait for a gradient."""
    if ahead == 1:
        return _with_early(_one_f_one_b(ahead, many), 0)
    return _one_f_one_b(ahead, many) if ahead == 0 else _pre_recompute(ahead, many)


def _shifted_critical_path(ahead: int, many: int) -> Iterator[Turn]:
    """The stage before the last has one more micro-batch in flight, which takes the last stage off the critical
    path.
    """
    if ahead == 1:
        begin: list[Turn] = [("F", m) for m in range(min(3, many))]
        begin += [turn for m in range(min(2, many)) for turn in (("R", m), ("B", m))]  # type: ignore[misc]
        return iter(begin + [turn for m in range(2, many) for turn in _after(m, many)])
    if ahead == 2:
        return _with_early(_pre_recompute(ahead, many), *((0,) if many > ahead else ()))
    return _last_no_recompute(ahead, many)


def _after(m: int, many: int) -> list[Turn]:
    return [("F", m + 1), ("B", m)] if m + 1 < many else [("B", m)]


def _zb_h1(ahead: int, many: int, stage: int) -> Iterator[Turn]:
    """Stage s defers weight gradients by s micro-batches and runs them in the cooldown bubbles."""
    waiting: list[int] = []
    for kind, m in _one_f_one_b(ahead, many):
        yield kind, m
        if kind == "B":
            waiting.append(m)
            if len(waiting) > stage or m + ahead >= many:
                yield "W", waiting.pop(0)
    yield from (("W", m) for m in waiting)


def _interleaved(num_stages: int, num_micro_batches: int, stage: int, chunks: int) -> Iterator[Pass]:
    parts, many = num_stages * chunks, num_micro_batches * chunks

    def place(k: int, backward: bool) -> tuple[int, int]:
        """(part, micro-batch) of the stage's k-th pass."""
        chunk = k % parts // num_stages
        part = (chunks - 1 - chunk if backward else chunk) * num_stages + stage
        return part, k // parts * num_stages + k % num_stages

    ahead = min(many, 2 * (num_stages - 1 - stage) + (chunks - 1) * num_stages)
    if num_micro_batches == num_stages:
        ahead = many
    for k in range(ahead):
        yield ("F", *place(k, False))
    for k in range(many):
        if k + ahead < many:
            yield ("F", *place(k + ahead, False))
        yield ("B", *place(k, True))


def _of_part(turns: Callable[[int, int], Iterator[Turn]]) -> Callable[[int, int, int, int], Iterator[Pass]]:
    """Adapt turns to the passes of a stage with one model part."""
    return lambda stages, many, stage, chunks: ((kind, stage, m) for kind, m in turns(stages - 1 - stage, many))


def _zero_bubble(num_stages: int, num_micro_batches: int, stage: int, chunks: int) -> Iterator[Pass]:
    return ((kind, stage, m) for kind, m in _zb_h1(num_stages - 1 - stage, num_micro_batches, stage))


def _zb_v(num_stages: int, num_micro_batches: int, stage: int, chunks: int) -> Iterator[Pass]:
    """Stage s has part s, on the way down, and part 2 p - 1 - s, on the way up.

    Fewer micro-batches than fill the pipeline have the list of as many as do, without the others.
    """
    many, after = max(num_micro_batches, 2 * num_stages - 1), num_stages - stage
    parts, made = {"v": stage, "^": 2 * num_stages - 1 - stage}, Counter[str]()
    ahead = many - num_stages - after + 1  # turns of the steady state that begin with a forward pass
    turns = chain(
        repeat("Fv", 2 * after - 1), repeat("F^ Fv", stage), repeat("F^ B^ W^", after),
        repeat("Fv Bv Wv F^ B^ W^", ahead), repeat("Bv Wv F^ B^ W^", many - num_stages - ahead),
        repeat("Bv B^", stage), repeat("Bv Wv", after), repeat("W^", stage), repeat("Wv", stage),
    )  # fmt: skip
    for turn in chain.from_iterable(each.split() for each in turns):
        if made[turn] < num_micro_batches:
            yield turn[0], parts[turn[1]], made[turn]  # type: ignore[misc]
        made[turn] += 1


PASSES: dict[str, Callable[[int, int, int, int], Iterator[Pass]]] = {}
"""Generators of a stage's passes, by (stages, micro-batches, stage, chunks)."""
PIPELINES: dict[str, Callable[..., Schedule]] = {}
"""Generators of schedules, functions of num_stages, num_micro_batches and recompute=True."""


# --- lists of ops ---


def _listed(
    name: str, num_stages: int, num_micro_batches: int, recompute: bool, *, chunks: int = 1, keeps_last: bool = False,
    placement: Placement = "loop",
) -> Schedule:  # fmt: skip
    """Build the schedule. keeps_last: the last stage never recomputes."""
    require_sizes(name, num_stages, num_micro_batches, chunks)
    parts = num_stages * chunks
    require_places(name, parts, num_micro_batches)

    def is_sent(part: int, other: int) -> bool:
        """Whether a message goes between two parts."""
        return 0 <= other < parts and len({stage_of(each, num_stages, placement) for each in (part, other)}) == 2

    def ops(stage: int) -> Iterator[Op]:
        recomputed = recompute and not (keeps_last and stage == num_stages - 1)
        early = set[tuple[int, int]]()
        for kind, part, m in PASSES[name](num_stages, num_micro_batches, stage, chunks):
            if kind == "R":
                early.add((part, m))
                if recomputed:
                    yield Op("R", part, m)
            elif kind == "W":
                yield Op("W", part, m)
            else:
                towards = 1 if kind == "F" else -1
                if is_sent(part, part - towards):
                    yield Op("receive", part, m, kind)
                if kind == "B" and recomputed and (part, m) not in early:
                    yield Op("R", part, m)
                yield Op(kind, part, m)
                if is_sent(part, part + towards):
                    yield Op("send", part, m, kind)

    found = tuple(op for stage in range(num_stages) for op in ops(stage))
    made = Schedule(name, parts, num_micro_batches, found, unit="stage", num_stages=num_stages, placement=placement)
    return replace(made, recompute=made.extent) if recompute else made


def _pipeline(
    name: str, passes: Callable[[int, int, int, int], Iterator[Pass]], about: str, *, chunks: int = 1,
    keeps_last: bool = False, placement: Placement = "loop",
) -> Callable[..., Schedule]:  # fmt: skip
    """Make a generator of schedules, and note it by name."""

    def generator(num_stages: int, num_micro_batches: int, recompute: bool = True, chunks: int = chunks) -> Schedule:
        return _listed(
            name, num_stages, num_micro_batches, recompute, chunks=chunks, keeps_last=keeps_last, placement=placement
        )

    generator.__name__, generator.__doc__ = name, about
    PASSES[name], PIPELINES[name] = passes, generator
    return generator


gpipe = _pipeline("gpipe", _of_part(_gpipe), "GPipe: all forward passes, then all backward passes in reverse order.")
one_f_one_b = _pipeline("one_f_one_b", _of_part(_one_f_one_b), """1F1B: the fewest micro-batches in flight that fill
    the pipeline, then one forward and one backward pass in turn.""")  # fmt: skip
pre_recompute = _pipeline("pre_recompute", _of_part(_pre_recompute), """1F1B that recomputes the last micro-batches
    while their gradients are in flight.""")  # fmt: skip
last_no_recompute = _pipeline("last_no_recompute", _of_part(_last_no_recompute), """`pre_recompute` whose last stage
    keeps its activations, as its backward pass follows at once.""", keeps_last=True)  # fmt: skip
shifted_critical_path = _pipeline("shifted_critical_path", _of_part(_shifted_critical_path), """`last_no_recompute`
    whose second-to-last stage runs one forward pass ahead, so that no stage waits for the last.""",
    keeps_last=True)  # fmt: skip
interleaved = _pipeline("interleaved", _interleaved, """Interleaved 1F1B with `chunks` model parts per stage: a bubble
    shorter by that factor, as many times the messages.

    num_micro_batches must be a multiple of num_stages, else ScheduleError.""", chunks=2)  # fmt: skip
zb_h1 = _pipeline("zb_h1", _zero_bubble, """ZB-H1: 1F1B with weight gradients as passes of their own, which fill most
    of the bubble at the same memory.""")  # fmt: skip
zb_v = _pipeline("zb_v", _zb_v, """ZB-V: two model parts per stage, the first on the way down and the second on the
    way back up, with weight gradients as passes of their own.

    With passes of equal length the bubble is half that of `zb_h1` at the memory of its first stage, on every stage.
    The loss is on the first stage.""", chunks=2, placement="v")  # fmt: skip


def require_sizes(pipeline: str, num_stages: int, num_micro_batches: int, chunks: int = 1) -> None:
    """Raise ScheduleError for sizes that the pipeline does not support, naming valid ones.

    pipeline: a name or a text.
    """
    if is_text(pipeline):
        written = from_text(pipeline, "stage")
        sizes = written.num_stages, written.num_sub_batches
        if sizes != (num_stages, num_micro_batches):
            raise ScheduleError(
                f"the list {written.name} is for {sizes[0]} stages and {sizes[1]} micro-batches, not "
                f"{num_stages} and {num_micro_batches}",
                0,
            )
        return
    if pipeline not in PIPELINES:
        raise ScheduleError(f"unknown pipeline {pipeline!r}; known are {', '.join(sorted(PIPELINES))}")
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{pipeline} requires at least 1 stage and 1 micro-batch, got {num_stages} and {num_micro_batches}"
        )
    if pipeline == "interleaved" and (num_micro_batches % num_stages or chunks < 1):
        raise ScheduleError(
            f"interleaved needs at least 1 chunk and micro-batches in multiples of the {num_stages} stages, got "
            f"{chunks} and {num_micro_batches}"
        )


def require_places(pipeline: str, num_parts: int, num_micro_batches: int) -> None:
    """Raise ScheduleError for so many passes that a list of them is too long to be built."""
    if num_parts * num_micro_batches > MOST_PLACES:
        raise ScheduleError(
            f"{pipeline} of {num_parts} model parts in {num_micro_batches} micro-batches has more than {MOST_PLACES} "
            "forward passes; give fewer micro-batches"
        )


def generate_pipeline(name: str, num_stages: int, num_micro_batches: int, recompute: bool = True) -> Schedule:
    """Generate the named pipeline schedule. Raises ScheduleError."""
    require_sizes(name, num_stages, num_micro_batches)
    return PIPELINES[name](num_stages, num_micro_batches, recompute)
