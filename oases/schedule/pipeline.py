"""Pipeline schedules: for every stage its ops in issue order, messages between the stages among them.

Generators are pure functions of the number of stages and micro-batches. An op's `block` is its part of the model, the
stage where each stage has one part, its `sub_batch` the micro-batch. R is an op of its own: what stands after a
receive runs once the gradient is there, what stands before it fills the time until then. An R right before an F runs
under it: piece by piece (`schedule.under`), while the F waits for its collectives.
Source: Merak (arXiv 2206.04959, section 5); interleaved: arXiv 2104.04473; ZB-H1: arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal, TypeAlias

from oases.schedule.ir import Op, ScheduleError

Turn: TypeAlias = tuple[Literal["F", "R", "B", "W"], int]
"""A pass and its micro-batch. R: recompute early, under the F that follows if one does. Without an R, a stage that
recomputes does so inside of its B."""

Pass: TypeAlias = tuple[Literal["F", "R", "B", "W"], int, int]
"""A pass, its part of the model and its micro-batch."""


@dataclass(frozen=True)
class Pipeline:
    """One step of a pipeline. stages: each stage's ops; every rank of a stage runs the same list.

    chunks: parts of the model that a stage has, stage s the parts s, s + num_stages, ...
    """

    name: str
    num_stages: int
    num_micro_batches: int
    stages: tuple[tuple[Op, ...], ...]
    chunks: int = 1

    def __len__(self) -> int:
        return sum(map(len, self.stages))

    @cached_property
    def has_weight_passes(self) -> bool:
        """Whether weight gradients are passes of their own, W."""
        return any(op.kind == "W" for ops in self.stages for op in ops)

    def in_flight(self, stage: int) -> int:
        """Most micro-batches, of any of its parts, whose forward pass is done and whose backward pass is not."""
        flying = most = 0
        for op in self.stages[stage]:
            flying += {"F": 1, "B": -1}.get(op.kind, 0)
            most = max(most, flying)
        return most

    def recomputes(self, stage: int) -> bool:
        """Whether a stage keeps no graph of its forward passes."""
        return any(op.kind == "R" for op in self.stages[stage])


# --- turns of one stage, by the number of stages behind it and of micro-batches ---


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
    """Once nothing is left to go forward, recompute while the gradient is on its way."""
    for kind, m in _one_f_one_b(ahead, many):
        if kind == "B" and m + ahead >= many:
            yield "R", m
        yield kind, m


def _with_early(turns: Iterator[Turn], *early: int) -> Iterator[Turn]:
    """Recompute these micro-batches early, too."""
    for kind, m in turns:
        if kind == "B" and m in early:
            yield "R", m
        yield kind, m


def _last_no_recompute(ahead: int, many: int) -> Iterator[Turn]:
    """The last stage keeps what it computes; the one before is then the first to wait for a gradient."""
    if ahead == 1:
        return _with_early(_one_f_one_b(ahead, many), 0)
    return _one_f_one_b(ahead, many) if ahead == 0 else _pre_recompute(ahead, many)


def _shifted_critical_path(ahead: int, many: int) -> Iterator[Turn]:
    """The stage before the last has one more micro-batch in flight, so the critical path leaves the last stage."""
    if ahead == 1:
        begin: list[Turn] = [("F", m) for m in range(min(3, many))]
        begin += [turn for m in range(min(2, many)) for turn in (("R", m), ("B", m))]  # type: ignore[misc]
        return iter(begin + [turn for m in range(2, many) for turn in _after(m, many)])
    if ahead == 2:
        return _with_early(_pre_recompute(ahead, many), *((0,) if many > ahead else ()))
    return _last_no_recompute(ahead, many)


def _after(m: int, many: int) -> list[Turn]:
    return [("F", m + 1), ("B", m)] if m + 1 < many else [("B", m)]


def _under_forward(turns: Iterator[Turn]) -> Iterator[Turn]:
    """What is recomputed after another micro-batch's F runs under it, one micro-batch under each."""
    found: list[Turn] = []
    for kind, m in turns:
        due = kind == "R" or (kind == "B" and ("R", m) not in found)
        free = found[-1:] not in ([], [("F", m)]) and found[-1][0] == "F" and "R" not in [k for k, _ in found[-2:-1]]
        if due and free:
            found.insert(-1, ("R", m))
        if not (due and free and kind == "R"):
            found.append((kind, m))
    return iter(found)


def _last_under_forward(ahead: int, many: int) -> Iterator[Turn]:
    return _under_forward(_last_no_recompute(ahead, many))


def _shifted_under_forward(ahead: int, many: int) -> Iterator[Turn]:
    return _under_forward(_shifted_critical_path(ahead, many))


def _zb_h1(ahead: int, many: int, stage: int) -> Iterator[Turn]:
    """Weight gradients wait, on stage s for s more micro-batches, and fill the time at the end."""
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


_TURNS: dict[str, Callable[[int, int], Iterator[Turn]]] = {
    "gpipe": _gpipe,
    "one_f_one_b": _one_f_one_b,
    "pre_recompute": _pre_recompute,
    "last_no_recompute": _last_no_recompute,
    "recompute_under_forward": _last_under_forward,
    "shifted_critical_path": _shifted_critical_path,
    "shifted_under_forward": _shifted_under_forward,
}
SHIFTED = ("shifted_critical_path", "shifted_under_forward")
"""Pipelines whose stage before the last has as much in flight as the one before it."""
UNDER_FORWARD = ("recompute_under_forward", "shifted_under_forward")
"""Pipelines in which an R may run under an F."""
KEEPS_LAST = ("last_no_recompute", "recompute_under_forward", *SHIFTED)
"""Pipelines whose last stage never recomputes."""


def turns(name: str, num_stages: int, num_micro_batches: int, stage: int) -> Iterator[Turn]:
    """The passes of one stage in order, of a pipeline whose stages have one part of the model.

    Raises ScheduleError for an unknown name, and where there is no stage or no micro-batch.
    """
    require_sizes(name, num_stages, num_micro_batches)
    if name == "zb_h1":
        return _zb_h1(num_stages - 1 - stage, num_micro_batches, stage)
    return _TURNS[name](num_stages - 1 - stage, num_micro_batches)


def require_sizes(name: str, num_stages: int, num_micro_batches: int, chunks: int = 1) -> None:
    """Raise ScheduleError for a pipeline that there is none of, naming what would do."""
    if name not in PIPELINES:
        raise ScheduleError(f"unknown pipeline {name!r}; known are {', '.join(sorted(PIPELINES))}")
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{name} needs at least 1 stage and 1 micro-batch, got {num_stages} and {num_micro_batches}"
        )
    if name == "interleaved" and (num_micro_batches % num_stages or chunks < 1):
        raise ScheduleError(
            f"interleaved needs at least 1 chunk and micro-batches in multiples of the {num_stages} stages, got "
            f"{chunks} and {num_micro_batches}"
        )


def chunks_of(name: str) -> int:
    """Parts of the model that each stage has in the pipeline that `generate_pipeline` makes of this name."""
    return 2 if name == "interleaved" else 1


def passes(name: str, num_stages: int, num_micro_batches: int, stage: int) -> Iterator[Pass]:
    """The passes of one stage in order, of any pipeline that `generate_pipeline` makes. Raises ScheduleError."""
    if name != "interleaved":
        yield from ((kind, stage, m) for kind, m in turns(name, num_stages, num_micro_batches, stage))
        return
    require_sizes(name, num_stages, num_micro_batches)
    yield from _interleaved(num_stages, num_micro_batches, stage, chunks_of(name))


def last_pass(name: str, num_micro_batches: int, stage: int) -> Pass:
    """The pass that ends a stage's work: behind it no gradient is added to any more."""
    last = 0 if name == "gpipe" else num_micro_batches - 1
    return "W" if name == "zb_h1" else "B", stage, last


@lru_cache(maxsize=4096)
def early(name: str, num_stages: int, num_micro_batches: int, stage: int) -> frozenset[tuple[int, int]]:
    """(part, micro-batch) that a stage recomputes apart from the backward pass, before the gradient is there."""
    every = passes(name, num_stages, num_micro_batches, stage)
    return frozenset((part, m) for kind, part, m in every if kind == "R")


@lru_cache(maxsize=4096)
def in_flight(name: str, num_stages: int, num_micro_batches: int, stage: int) -> int:
    """Most micro-batches, of any of its parts, whose forward pass is done on the stage and whose backward is not."""
    require_sizes(name, num_stages, num_micro_batches)
    if name != "gpipe":  # with more of them, one goes forward when another has gone backward
        num_micro_batches = min(num_micro_batches, 4 * num_stages)
    flying = most = 0
    for kind, _, _ in passes(name, num_stages, num_micro_batches, stage):
        flying += {"F": 1, "B": -1}.get(kind, 0)
        most = max(most, flying)
    return most


# --- lists of ops ---


def _pipeline(name: str, num_stages: int, num_micro_batches: int, recompute: bool) -> Pipeline:
    def ops(stage: int) -> Iterator[Op]:
        last = stage == num_stages - 1
        again = recompute and not (last and name in KEEPS_LAST)
        early = set[int]()
        under: tuple[Op, ...] = ()
        every = list(turns(name, num_stages, num_micro_batches, stage))
        for (kind, m), after in zip_longest(every, every[1:]):
            if kind == "R":
                early.add(m)
                found = (Op("R", stage, m),) if again else ()
                if after is not None and after[0] == "F":
                    under = found
                else:
                    yield from found
            elif kind == "W":
                yield Op("W", stage, m)
            else:
                inside = kind == "B" and again and m not in early
                yield from _pass(kind, stage, m, num_stages, (Op("R", stage, m),) if inside else under)
                under = ()

    turns(name, num_stages, num_micro_batches, 0)  # says what is wrong where there is no stage
    return Pipeline(name, num_stages, num_micro_batches, tuple(tuple(ops(s)) for s in range(num_stages)))


def _pass(kind: Literal["F", "B"], part: int, m: int, parts: int, recompute: tuple[Op, ...] = ()) -> Iterator[Op]:
    """A pass with its messages. parts: of the model, in order over the stages. recompute: right before it, if any."""
    first, last = (part == 0, part == parts - 1) if kind == "F" else (part == parts - 1, part == 0)
    if not first:
        yield Op("receive", part, m, kind)
    yield from recompute
    yield Op(kind, part, m)
    if not last:
        yield Op("send", part, m, kind)


def gpipe(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """All forward passes, then all backward passes, the last micro-batch first."""
    return _pipeline("gpipe", num_stages, num_micro_batches, recompute)


def one_f_one_b(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """As few micro-batches in flight as keep the pipeline full: then one forward, one backward pass in turn."""
    return _pipeline("one_f_one_b", num_stages, num_micro_batches, recompute)


def pre_recompute(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """1F1B whose last micro-batches are recomputed while their gradients are on the way."""
    return _pipeline("pre_recompute", num_stages, num_micro_batches, recompute)


def last_no_recompute(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """Besides, the last stage keeps what its backward pass needs: it follows the forward pass at once."""
    return _pipeline("last_no_recompute", num_stages, num_micro_batches, recompute)


def shifted_critical_path(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """Besides, the stage before the last runs one forward pass ahead, so that no stage waits for the last one."""
    return _pipeline("shifted_critical_path", num_stages, num_micro_batches, recompute)


def recompute_under_forward(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """`last_no_recompute` that recomputes a micro-batch under the collectives of the next one's forward pass.

    In a forward pass there is as much to send as in a backward pass, for half of the compute; what is computed again
    needs no gradient and, with most schedules, sends nothing.
    """
    return _pipeline("recompute_under_forward", num_stages, num_micro_batches, recompute)


def shifted_under_forward(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """`shifted_critical_path` that recomputes under the forward pass before, as `recompute_under_forward` does."""
    return _pipeline("shifted_under_forward", num_stages, num_micro_batches, recompute)


def zb_h1(num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """1F1B whose weight gradients, passes of their own, fill most of the bubble at the same memory."""
    return _pipeline("zb_h1", num_stages, num_micro_batches, recompute)


def interleaved(num_stages: int, num_micro_batches: int, recompute: bool = True, chunks: int = 2) -> Pipeline:
    """1F1B over `chunks` parts of the model per stage: the bubble is that much shorter, messages as many more.

    Micro-batches come in multiples of the stages, else ScheduleError.
    """
    require_sizes("interleaved", num_stages, num_micro_batches, chunks)

    def ops(stage: int) -> Iterator[Op]:
        for kind, part, m in _interleaved(num_stages, num_micro_batches, stage, chunks):
            assert kind in ("F", "B")
            again = (Op("R", part, m),) if recompute and kind == "B" else ()
            yield from _pass(kind, part, m, num_stages * chunks, again)

    stages = tuple(tuple(ops(stage)) for stage in range(num_stages))
    return Pipeline("interleaved", num_stages, num_micro_batches, stages, chunks)


PIPELINES: dict[str, Callable[..., Pipeline]] = {
    function.__name__: function
    for function in (
        gpipe, one_f_one_b, pre_recompute, last_no_recompute, shifted_critical_path, interleaved, zb_h1,
        recompute_under_forward, shifted_under_forward,
    )
}  # fmt: skip


def generate_pipeline(name: str, num_stages: int, num_micro_batches: int, recompute: bool = True) -> Pipeline:
    """The named pipeline schedule. Raises ScheduleError for an unknown name."""
    require_sizes(name, num_stages, num_micro_batches)
    return PIPELINES[name](num_stages, num_micro_batches, recompute)
