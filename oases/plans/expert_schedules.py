"""Schedules of mixture-of-experts blocks: expert compute, all-to-alls and replica transfers.

D 0, E 0, F 0, D 1, ...: tokens go all-to-all from D b to E b and from E b to F b, their gradients the other way.
Placement is decided before the step, so the parameters of replicas can be transferred under the compute of the
previous block.
Source: Pro-Prophet (arXiv 2411.10003), section on the block-wise scheduler, which names Trans and Agg.

Blocks of a tensor-parallel list send their tokens by `exchanging`, in three pieces with an all-to-all after the first
and after the second: D (router), E (experts), F (weighted sum); in the backward pass BF, BE, B. While the tokens of
one sub-batch travel, another's router, experts or the layers before it run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

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
    """Pro-Prophet's schedule: replicas of the next block are sent under E, F and D, their gradients under BE to BF.

    The paper hides the first part under E and the rest between experts; here the parts are the two rounds, and the
    smaller one, from the owner ranks, runs there. The placement search of the next step runs under the dispatch
    all-to-all. Transfers never run beside an all-to-all, which would slow both down, unless no other op could hide
    them.
    """

    def non_expert(b: int) -> Iterator[Op]:
        following = b + 1 < num_blocks
        yield from [Op("share", b + 1, 0)] if following else []
        yield from _between(b, num_blocks)
        yield from [_wait("share", 0), Op("join", 0, 0)] if b == 0 else []
        yield from [_wait("share", b + 1)] if following else []

    def forward() -> Iterator[Op]:
        yield from (Op("share", 0, 0), *non_expert(0))
        for b in range(num_blocks):
            yield from (_sent("D", b), Op("P", b, 0), _wait("D", b), _wait("join", b))
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


def _between(b: int, num_blocks: int) -> Iterator[Op]:
    """Forward pass between the experts of blocks b - 1 and b."""
    yield from [Op("F", b - 1, 0)] if b else []
    yield from [Op("D", b, 0)] if b < num_blocks else []


def _forward(num_blocks: int, before_experts: _Insert) -> Iterator[Op]:
    yield Op("D", 0, 0)
    for b in range(num_blocks):
        yield from (_sent("D", b), Op("P", b, 0), _wait("D", b), *before_experts(b))
        yield from (Op("E", b, 0), _sent("E", b), _wait("E", b), *_between(b + 1, num_blocks))


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

    def recomputed(*ops: tuple[Compute, int]) -> list[Op]:
        return [Op(kind, b, 0) for kind, b in ops if recompute and b >= 0]

    last = num_blocks - 1
    yield from (*recomputed(("R", last)), Op("BF", last, 0))
    for b in reversed(range(num_blocks)):
        yield from (_sent("BF", b), *recomputed(("RE", b)), _wait("BF", b), *before_experts(b))
        yield from (Op("BE", b, 0), *behind_experts(b), _sent("BE", b), *recomputed(("R", b - 1), ("RD", b)))
        yield from (_wait("BE", b), *before_non_experts(b), Op("B", b, 0))
        yield from (*([Op("BF", b - 1, 0)] if b else []), *behind(b))


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


# --- tensor-parallel lists ---

_FORWARD: tuple[Compute, ...] = ("D", "E", "F")
_BACKWARD: tuple[Compute, ...] = ("BF", "BE", "B")


def exchanging(schedule: Schedule, blocks: Collection[int]) -> Schedule:
    """The schedule with ops of their own for what these blocks send to experts.

    Each of the three pieces of a sub-batch runs behind the one before it of the next sub-batch, which hides its
    all-to-all. Blocks that are recomputed, and sub-batches of tokens and of parts of a sequence, stay as they are.
    """
    if schedule.along != "batch" or schedule.sequence_parallel or schedule.dispatched:
        return schedule
    ops: Sequence[Op] = schedule.ops
    for block in sorted(set(blocks) - schedule.recomputed_blocks):
        pieces = [_FORWARD, _BACKWARD] if schedule.backward else [_FORWARD]
        if all(_is_run(ops, block, each[-1]) for each in pieces):
            for each in pieces:
                ops = _in_pieces(ops, block, each)
    if ops is schedule.ops:
        return schedule
    made = replace(schedule, ops=tuple(ops))
    validate(made)
    return made


def _is_run(ops: Sequence[Op], block: int, kind: Compute) -> bool:
    """Whether a block's ops of this kind all come before their results are waited for."""
    at = [place for place, op in enumerate(ops) if op.block == block and op.kind == kind]
    return not any(op.block == block and op.kind == "wait" and op.of == kind for op in ops[at[0] : at[-1]])


def _in_pieces(ops: Sequence[Op], block: int, pieces: Sequence[Compute]) -> list[Op]:
    """The ops with one pass of a block in pieces."""
    whole = pieces[-1]
    order = [op.sub_batch for op in ops if op.kind == whole and op.block == block]
    first, last = (ops.index(Op(whole, block, s)) for s in (order[0], order[-1]))
    # The start of its sum and its weight gradients follow the last piece.
    behind = {s: [Op(whole, block, s), Op("all_reduce", block, s, whole)] for s in order}
    for op in ops[first:last]:
        if whole == "B" and op.kind == "W" and op.block == block:
            behind[op.sub_batch].append(op)
    moved = {op for each in behind.values() for op in each}
    made = [*ops[:first]]
    for op in ops[first:]:
        if op not in moved:
            made.append(op)
        elif op.kind == whole:
            made.extend(_turn(block, pieces, order, order.index(op.sub_batch), behind))
    return made


def _turn(
    block: int, pieces: Sequence[Compute], order: Sequence[int], turn: int, behind: dict[int, list[Op]]
) -> Iterator[Op]:
    """The first piece of sub-batch number `turn`, the second of the one before, the third of that before it.

    After the last first piece all that is left.
    """
    one, two, _ = pieces
    for now in range(turn, turn + 3) if turn + 1 == len(order) else (turn,):
        if now == turn:
            yield from (Op(one, block, order[now]), Op("all_to_all", block, order[now], one))
        if 0 < now <= len(order):
            s = order[now - 1]
            yield from (Op("wait", block, s, one), Op(two, block, s), Op("all_to_all", block, s, two))
        if 1 < now <= len(order) + 1:
            s = order[now - 2]
            yield from (Op("wait", block, s, two), *behind[s])
