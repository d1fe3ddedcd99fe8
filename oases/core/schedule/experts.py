"""Schedules of mixture-of-experts blocks: expert compute, all-to-alls and replica transfers.

N 0, E 0, N 1, E 1, ..., N n: n blocks of experts have n + 1 ops N, the last one after all experts. Tokens go
all-to-all from N b to E b and from E b to N b + 1, their gradients the other way. Placement is decided before the
step, so the parameters of replicas can be transferred under the compute of the previous block.
Source: Pro-Prophet (arXiv 2411.10003), section on the block-wise scheduler, which names Trans and Agg.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from oases.core.schedule.ops import Compute, Op, ScheduleError, Transfer
from oases.core.schedule.schedule import Extent, Schedule
from oases.core.schedule.text import from_text, is_text
from oases.core.schedule.validate import validate
from oases.limits import MOST_PLACES


def _sent(kind: Compute, block: int) -> Op:
    return Op("all_to_all", block, 0, kind)


def _wait(kind: Compute | Transfer, block: int) -> Op:
    return Op("wait", block, 0, kind)


def _exposed(kind: Transfer, block: int) -> Iterator[Op]:
    yield Op(kind, block, 0)
    yield _wait(kind, block)


def plain(num_blocks: int, recompute: bool = False) -> Schedule:
    """Plain expert parallelism: no replicas, only tokens are sent."""
    ops = [*_forward(num_blocks, _nothing), *_backward(num_blocks, recompute)]
    return _listed("plain", num_blocks, ops, recompute)


def blocking(num_blocks: int, recompute: bool = False) -> Schedule:
    """Replica parameters are sent right before use and their gradients right after: nothing is hidden. (6)"""

    def trans(b: int) -> Iterator[Op]:
        yield from (*_exposed("share", b), *_exposed("join", b))

    def agg(b: int) -> Iterator[Op]:
        yield from (*_exposed("split", b), *_exposed("return", b))

    ops = [*_forward(num_blocks, trans), *_backward(num_blocks, recompute, behind_experts=agg)]
    return _listed("blocking", num_blocks, ops, recompute)


def block_wise(num_blocks: int, recompute: bool = False) -> Schedule:
    """Pro-Prophet's schedule: replicas of the next block are sent under N and E, their gradients under BE and BN.

    The paper hides the first part under E and the rest under N; here the parts are the two rounds, and the smaller
    one, from the owner ranks, runs under N. The placement search of the next step runs under the dispatch
    all-to-all. Transfers never run beside an all-to-all, which would slow both down, unless no other op could hide
    them.
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
    return _listed("block_wise", num_blocks, ops, recompute)


def _listed(name: str, num_blocks: int, ops: Iterable[Op], recompute: bool) -> Schedule:
    extent: Extent = "full" if recompute else "none"
    return Schedule(name, num_blocks, 1, tuple(ops), extent, unit="experts")


_Insert = Callable[[int], Iterable[Op]]
"""Ops that a schedule inserts at one position of each block, given the block's number."""


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
    """Backward ops. Recomputation depends on no collective, so it hides the all-to-alls of the gradients."""

    def recomputed(kind: Compute, b: int) -> list[Op]:
        return [Op(kind, b, 0)] if recompute else []

    yield from (*recomputed("RN", num_blocks), Op("BN", num_blocks, 0))
    for b in reversed(range(num_blocks)):
        yield from (_sent("BN", b + 1), *recomputed("RE", b), _wait("BN", b + 1), *before_experts(b))
        yield from (Op("BE", b, 0), *behind_experts(b), _sent("BE", b), *recomputed("RN", b), _wait("BE", b))
        yield from (*before_non_experts(b), Op("BN", b, 0), *behind(b))


EXPERT_SCHEDULES: dict[str, Callable[[int, bool], Schedule]] = {
    function.__name__: function for function in (plain, blocking, block_wise)
}


def generate_experts(name: str, num_blocks: int, recompute: bool = False) -> Schedule:
    """Generate the named schedule and validate it. Raises ScheduleError for an unknown name or no block."""
    if name not in EXPERT_SCHEDULES:
        raise ScheduleError(f"unknown expert schedule {name!r}; known are {', '.join(EXPERT_SCHEDULES)}")
    if num_blocks < 1:
        raise ScheduleError(f"{name} needs at least 1 block of experts, got {num_blocks}")
    if num_blocks > MOST_PLACES:
        raise ScheduleError(f"{name} takes up to {MOST_PLACES} blocks of experts, got {num_blocks}; give fewer")
    schedule = EXPERT_SCHEDULES[name](num_blocks, recompute)
    validate(schedule)
    return schedule


def resolve_experts(schedule: str, num_blocks: int, recompute: bool = False) -> Schedule:
    """Resolve an expert schedule given by name or in its text form. Raises ScheduleError.

    recompute: of a named schedule; a text states its own.
    """
    if not is_text(schedule):
        return generate_experts(schedule, num_blocks, recompute)
    found = from_text(schedule, "experts")
    if found.num_blocks != num_blocks:
        raise ScheduleError(f"list {found.name} is for {found.num_blocks} blocks, but the model has {num_blocks}", 0)
    return found
