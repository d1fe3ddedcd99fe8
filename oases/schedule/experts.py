"""Schedules of mixtures of experts: blocks of experts with what lies between them, and where their copies travel.

N 0, E 0, N 1, E 1, ..., N n: with n blocks of experts there are n + 1 ops N, the last one behind all experts. Tokens
go all-to-all from N b to E b and from E b to N b + 1, their gradients the other way. Which experts are copied whereto
is decided before the step, so parameters can travel under the compute of the block before.
Source: Pro-Prophet (arXiv 2411.10003), section on the block-wise scheduler; Trans and Agg are its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from oases.schedule.ir import BACKWARD, Experts, Op, ScheduleError, Transfer

_CARRIERS = ("all_to_all", "share", "join", "split", "return")
_TRANSFERS = _CARRIERS[1:]


@dataclass(frozen=True)
class ExpertSchedule:
    """The ops of one forward and backward pass over `num_blocks` blocks of experts, the same on every rank.

    recompute: whether nothing but what came over the wire is kept, and E and N run again in the backward pass.
    """

    name: str
    num_blocks: int
    ops: tuple[Op, ...]
    recompute: bool = False

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def forward(self) -> tuple[Op, ...]:
        """The ops of the forward pass."""
        return tuple(op for op in self.ops if not _in_backward(op))

    @cached_property
    def backward(self) -> tuple[Op, ...]:
        """The ops of the backward pass, recomputation included."""
        return tuple(op for op in self.ops if _in_backward(op))

    @cached_property
    def lines(self) -> dict[Op, int]:
        """Where each op stands, counted from 1."""
        return {op: line for line, op in enumerate(self.ops, start=1)}

    @cached_property
    def collectives(self) -> tuple[Op, ...]:
        """The collectives, in the order in which every rank must issue them."""
        return tuple(op for op in self.ops if op.kind in _CARRIERS)

    @property
    def copies(self) -> bool:
        """Whether experts are computed elsewhere than at home."""
        return any(op.kind == "share" for op in self.ops)


def started_by(wait: Op) -> Op:
    """The collective that a wait is for."""
    if wait.of in _TRANSFERS:
        return Op(wait.of, wait.block, wait.sub_batch)
    return Op("all_to_all", wait.block, wait.sub_batch, wait.of)


def _in_backward(op: Op) -> bool:
    return (op.of or op.kind) in BACKWARD


def _sent(kind: Experts, block: int) -> Op:
    return Op("all_to_all", block, 0, kind)


def _wait(kind: Experts | Transfer, block: int) -> Op:
    return Op("wait", block, 0, kind)


def _exposed(kind: Transfer, block: int) -> Iterator[Op]:
    yield Op(kind, block, 0)
    yield _wait(kind, block)


# --- generators ---


def plain(num_blocks: int, recompute: bool = False) -> ExpertSchedule:
    """Expert parallelism as it is: every expert at home, nothing but tokens on the wire."""
    ops = [*_forward(num_blocks, _nothing), *_backward(num_blocks, recompute)]
    return ExpertSchedule("plain", num_blocks, tuple(ops), recompute)


def blocking(num_blocks: int, recompute: bool = False) -> ExpertSchedule:
    """Copies travel right before they are needed, and their gradients right after: nothing hides them. (6)"""

    def trans(b: int) -> Iterator[Op]:
        yield from (*_exposed("share", b), *_exposed("join", b))

    def agg(b: int) -> Iterator[Op]:
        yield from (*_exposed("split", b), *_exposed("return", b))

    ops = [*_forward(num_blocks, trans), *_backward(num_blocks, recompute, behind_experts=agg)]
    return ExpertSchedule("blocking", num_blocks, tuple(ops), recompute)


def block_wise(num_blocks: int, recompute: bool = False) -> ExpertSchedule:
    """Pro-Prophet's: the copies of the next block travel under this one's N and E, their gradients under BE and BN.

    There the first part goes under E and what N can hide after it; here the parts are the two rounds, and the smaller
    one, from the homes, goes under N. The search for the next step's placement runs under the tokens' way to the
    experts. Nothing travels beside tokens, which would only slow both down, but where no other block could hide it.
    """

    def non_expert(b: int) -> Iterator[Op]:
        following = b + 1 < num_blocks
        yield from [Op("share", b + 1, 0)] if following else []
        yield Op("N", b, 0)
        yield from [_wait("share", 0), Op("join", 0, 0)] if b == 0 else []
        yield from [_wait("share", b + 1)] if following else []

    def forward() -> Iterator[Op]:
        yield from (Op("share", 0, 0), *non_expert(0))
        for b in range(num_blocks):
            yield from (_sent("N", b), Op("P", b, 0), _wait("N", b), _wait("join", b))
            yield from [Op("join", b + 1, 0)] if b + 1 < num_blocks else []
            yield from (Op("E", b, 0), _sent("E", b), _wait("E", b), *non_expert(b + 1))

    def before_experts(b: int) -> Iterator[Op]:
        yield from [Op("split", b + 1, 0)] if b + 1 < num_blocks else []

    def before_non_experts(b: int) -> Iterator[Op]:
        yield from [_wait("split", b + 1), Op("return", b + 1, 0)] if b + 1 < num_blocks else []
        yield from [Op("split", 0, 0)] if b == 0 else []

    def at_the_end(b: int) -> Iterator[Op]:
        yield from [_wait("return", b + 1)] if b + 1 < num_blocks else []
        yield from [_wait("split", 0), *_exposed("return", 0)] if b == 0 else []

    ops = [
        *forward(),
        *_backward(
            num_blocks, recompute, before_experts=before_experts, before_non_experts=before_non_experts,
            behind=at_the_end,
        ),
    ]  # fmt: skip
    return ExpertSchedule("block_wise", num_blocks, tuple(ops), recompute)


_Insert: TypeAlias = Callable[[int], Iterable[Op]]
"""What a list has besides at some place of each block, given its number."""


def _nothing(block: int) -> Iterable[Op]:
    return ()


def _forward(num_blocks: int, before_experts: _Insert) -> Iterator[Op]:
    yield Op("N", 0, 0)
    for b in range(num_blocks):
        yield from (_sent("N", b), Op("P", b, 0), _wait("N", b), *before_experts(b))
        yield from (Op("E", b, 0), _sent("E", b), _wait("E", b), Op("N", b + 1, 0))


def _backward(
    num_blocks: int,
    recompute: bool,
    *,
    before_experts: _Insert = _nothing,
    behind_experts: _Insert = _nothing,
    before_non_experts: _Insert = _nothing,
    behind: _Insert = _nothing,
) -> Iterator[Op]:
    """Recomputation needs nothing from the wire, so it hides the ways of the gradients."""

    def again(kind: Experts, b: int) -> list[Op]:
        return [Op(kind, b, 0)] if recompute else []

    yield from (*again("RN", num_blocks), Op("BN", num_blocks, 0))
    for b in reversed(range(num_blocks)):
        yield from (_sent("BN", b + 1), *again("RE", b), _wait("BN", b + 1), *before_experts(b))
        yield from (Op("BE", b, 0), *behind_experts(b), _sent("BE", b), *again("RN", b), _wait("BE", b))
        yield from (*before_non_experts(b), Op("BN", b, 0), *behind(b))


EXPERT_SCHEDULES: dict[str, Callable[[int, bool], ExpertSchedule]] = {
    function.__name__: function for function in (plain, blocking, block_wise)
}


def generate_experts(name: str, num_blocks: int, recompute: bool = False) -> ExpertSchedule:
    """The named schedule, validated. Raises ScheduleError for an unknown name and for no block."""
    if name not in EXPERT_SCHEDULES:
        raise ScheduleError(f"unknown schedule of experts {name!r}; known are {', '.join(EXPERT_SCHEDULES)}")
    if num_blocks < 1:
        raise ScheduleError(f"{name} needs at least 1 block of experts, got {num_blocks}")
    schedule = EXPERT_SCHEDULES[name](num_blocks, recompute)
    validate_experts(schedule)
    return schedule


# --- validation ---


def needs(op: Op, schedule: ExpertSchedule) -> list[Op]:
    """The ops that must come before `op`: the data it reads."""
    b = op.block
    again = schedule.recompute
    table: dict[str, list[Op]] = {
        "N": [_wait("E", b - 1)] if b else [],
        "P": [Op("N", b, 0)],
        "E": [_wait("N", b), *([_wait("join", b)] if schedule.copies else [])],
        "RN": [Op("N", b, 0)],
        "RE": [Op("E", b, 0)],
        "BN": [Op("N", schedule.num_blocks, 0), *([_wait("BE", b)] if b < schedule.num_blocks else [])],
        "BE": [_wait("BN", b + 1)],
        "share": [],
        "join": [_wait("share", b)],
        "split": [Op("BE", b, 0)],
        "return": [_wait("split", b)],
    }
    if op.kind in ("BN", "BE") and again:
        table[op.kind].append(Op("RN" if op.kind == "BN" else "RE", b, 0))
    if op.kind == "all_to_all":
        return [Op(op.of, b, 0)] if op.of is not None else []
    return [started_by(op)] if op.kind == "wait" else table[op.kind]


def required(schedule: ExpertSchedule) -> Iterator[Op]:
    """The ops that the list must hold for the step to be whole."""
    n = schedule.num_blocks
    yield from (Op(kind, b, 0) for kind in ("N", "BN") for b in range(n + 1))
    yield from (Op(kind, b, 0) for kind in ("E", "P", "BE") for b in range(n))
    if schedule.recompute:
        yield from (Op("RN", b, 0) for b in range(n + 1))
        yield from (Op("RE", b, 0) for b in range(n))
    if schedule.copies:
        yield from (_wait(kind, b) for kind in ("join", "return") for b in range(n))  # type: ignore[arg-type]


def validate_experts(schedule: ExpertSchedule) -> None:
    """Raise ScheduleError, naming op and line, unless every rank can run `schedule` to the end."""
    done: dict[Op, int] = {}
    for line, op in enumerate(schedule, start=1):
        _require_possible(op, f"op {line} ({op})", schedule, done)
        done[op] = line
    for op in required(schedule):
        if op not in done:
            raise ScheduleError(f"'{op}' is missing: the step would not be whole without it")
    waited = {started_by(op) for op in schedule if op.kind == "wait"}
    for op in schedule.collectives:
        if op not in waited:
            raise ScheduleError(f"op {done[op]} ({op}) is never waited for")


def _require_possible(op: Op, where: str, schedule: ExpertSchedule, done: dict[Op, int]) -> None:
    behind = (op.of or op.kind) in ("N", "RN", "BN")  # of which there is one more
    if not 0 <= op.block < schedule.num_blocks + behind or op.sub_batch:
        raise ScheduleError(f"{where}: the schedule has {schedule.num_blocks} blocks of experts, counted from 0")
    if op in done:
        raise ScheduleError(f"{where}: done twice, first as op {done[op]}")
    for need in needs(op, schedule):
        if need not in done:
            raise ScheduleError(f"{where}: its input is missing; '{need}' must come before it")
