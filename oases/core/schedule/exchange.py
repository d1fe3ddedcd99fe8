"""Blocks that send tokens to experts: a tensor-parallel schedule with their all-to-alls as ops of its own list.

Such a block runs in three pieces, with an all-to-all after the first and after the second:
    forward   D (router), E (experts), F (weighted sum)         backward   BF, BE, B
While the tokens of one sub-batch travel, another's router, experts or the layers before it run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from oases.core.schedule.ops import Compute, Op
from oases.core.schedule.schedule import Schedule
from oases.core.schedule.validate import validate

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
