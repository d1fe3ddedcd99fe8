"""Schedules along the sequence: sequence parallelism for any schedule, and sub-batches of tokens for a batch of one.

Sequence parallelism (arXiv 2205.05198) replaces an all-reduce by a reduce-scatter before C and an all-gather after
it, so that norms, dropout and residuals work on a shard of the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from oases.core.schedule.ops import Op
from oases.core.schedule.schedule import Schedule
from oases.core.schedule.tensor import LayerOf, Recompute, extent_of, received, recomputed_blocks, started
from oases.core.schedule.validate import needs, validate

_HEAVY = ("F", "R", "B", "W")


def sequence_parallel(schedule: Schedule) -> Schedule:
    """Replace every all-reduce by a reduce-scatter and an all-gather.

    To hide both, C (or BC), which lies between them, moves to the middle of the compute that hid the all-reduce.
    """
    if schedule.sequence_parallel:
        return schedule
    validate(schedule)
    naive = replace(schedule, ops=tuple(_gathered(schedule)))
    moved = replace(naive, ops=tuple(_balanced(naive)))
    validate(moved)
    return moved


def _gathered(schedule: Schedule) -> Iterator[Op]:
    subs, last = range(schedule.num_sub_batches), schedule.num_blocks - 1
    ending = [Op("wait", last, s, "C") for s in subs]
    for op in schedule:
        b, s = op.block, op.sub_batch
        if op.in_backward:
            yield from ending
            ending = []
        if op.kind == "F" and b > 0:
            yield Op("wait", b - 1, s, "C")
        if op.kind == "R" and (b, s) in schedule.recomputed_inputs:
            yield Op("wait", b - 1, s, "RC")
        if op.kind == "B":
            yield Op("BC", b, s)
            yield Op("all_gather", b, s, "BC")
            yield Op("wait", b, s, "BC")
        yield op._replace(kind="reduce_scatter") if op.kind == "all_reduce" else op
        if op.kind == "C" or (op.kind == "RC" and (b + 1, s) in schedule.recomputed_inputs):
            yield Op("all_gather", b, s, op.kind)
    yield from ending


def _balanced(schedule: Schedule) -> list[Op]:
    """Move each op between the two collectives to the middle of the independent compute before it.

    It moves by at most as many ops as hid the all-reduce, so the cost is linear in the length of the list.
    """
    ops = list(schedule.ops)
    at = {op: place for place, op in enumerate(ops)}
    border = len(schedule.forward)
    for gather in [op for op in ops if op.kind == "all_gather"]:
        end, begin = at[gather], at[gather.carried]
        if begin and ops[begin - 1].kind == "wait":
            begin -= 1
        group = ops[begin : end + 1]
        inputs = [need for op in group for need in needs(op, schedule) if need not in group]
        earliest = max([border if gather.in_backward else 0, *(at[need] + 1 for need in inputs)])
        heavy = [place for place in range(earliest, begin) if ops[place].kind in _HEAVY]
        hidden_before = (len(heavy) + 1) // 2
        if hidden_before < len(heavy):
            to = heavy[hidden_before]
            ops[to : end + 1] = group + ops[to:begin]
            at.update((ops[place], place) for place in range(to, end + 1))
    return ops


def along_sequence(
    num_blocks: int,
    num_sub_batches: int,
    joint: Collection[int],
    recompute: Recompute = "none",
    layer_of: LayerOf = None,
) -> Schedule:
    """The Oases schedule with sub-batches along the sequence, for batches too small to split.

    joint: blocks that need every token at once (attention to later tokens). They run whole; all-reduces of their
    sub-batches are hidden under the adjacent token-wise blocks (MLP), and weight gradients fill the wait before them
    in the backward pass. In others a sub-batch may read earlier ones (causal attention): the forward pass and
    recomputation run sub-batches in order, the backward pass in reverse.
    """
    recomputed = recomputed_blocks(num_blocks, recompute, layer_of)
    passes = _Passes(num_blocks, num_sub_batches, frozenset(joint), recomputed)
    ops = (*passes.forward(), *passes.backward())
    extent = extent_of(recomputed, num_blocks)
    schedule = Schedule("oases", num_blocks, num_sub_batches, ops, extent, "sequence", passes.joint)
    validate(schedule)
    return schedule


@dataclass(frozen=True)
class _Passes:
    """The forward and the backward pass of `along_sequence`."""

    num_blocks: int
    num_sub_batches: int
    joint: frozenset[int]
    recomputed: frozenset[int]

    def forward(self) -> Iterator[Op]:
        for b in range(self.num_blocks):
            if b in self.joint:
                yield from self._combined(b - 1)
                yield Op("F", b, 0)
                yield from (Op("all_reduce", b, s, "F") for s in range(self.num_sub_batches))
                continue
            for s in range(self.num_sub_batches):
                if b > 0:
                    yield from received("F", b - 1, s, "C")
                yield from started("F", b, s)
        yield from self._combined(self.num_blocks - 1)

    def backward(self) -> Iterator[Op]:
        # The sub-batch that finished last goes first.
        order = list(reversed(range(self.num_sub_batches)))
        for b in reversed(range(self.num_blocks)):
            again = [Op("R", b, s) for s in range(self.num_sub_batches) if b in self.recomputed]
            if b in self.joint:
                yield from again[:1]
                for s in order:
                    yield from self._arrived(b, s)
                    yield Op("BC", b, s)
                yield Op("B", b, 0)
                yield from (Op("all_reduce", b, s, "B") for s in order)
                yield Op("W", b, 0)
                continue
            yield from again
            for s in order:
                yield from self._arrived(b, s)
                yield from started("B", b, s)
            yield from (Op("W", b, s) for s in order)
        yield from (Op("wait", 0, s, "B") for s in order)

    def _combined(self, block: int) -> Iterator[Op]:
        if block >= 0:
            for s in range(self.num_sub_batches):
                yield from received("F", block, s, "C")

    def _arrived(self, block: int, s: int) -> Iterator[Op]:
        if block < self.num_blocks - 1:
            yield Op("wait", block + 1, s, "B")
