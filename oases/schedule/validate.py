"""Proves that a schedule can run: every input there, every wait after its start, all ranks in one order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from oases.schedule.ir import STARTS, Collective, Compute, Op, Schedule, ScheduleError

_ONCE: tuple[str, ...] = ("F", "R", "B", "W")
"""The ops that a joint block runs once for all sub-batches."""


def needs(op: Op, schedule: Schedule) -> list[Op]:
    """The ops that must come before `op`: the data it reads."""
    b, s = op.block, op.sub_batch
    if op.kind in STARTS:
        return [_made_by(op.carried, schedule)]
    if op.kind == "wait":
        return [schedule.starts.get(op.carried) or Op("all_reduce", b, s, op.of)]
    if op.kind == "C":
        return [Op("wait", b, s, "F")]
    if op.kind == "RC":
        return [Op("wait", b, s, "R")]
    if op.kind == "W":
        return [Op("B", b, s)]
    everyone = range(schedule.num_sub_batches) if b in schedule.joint else [s]
    gathered = schedule.sequence_parallel
    if op.kind == "F":
        before = [Op("wait", b - 1, each, "C") if gathered else Op("C", b - 1, each) for each in everyone]
        return before if b > 0 else []
    if op.kind == "R":  # its input was kept, unless an RC made it again first
        remade = gathered and (b, s) in schedule.remade_inputs
        return [Op("F", b, s)] + ([Op("wait", b - 1, s, "RC")] if remade else [])
    again = schedule.recomputed
    if op.kind == "B":
        apart = {Op("BC", b, each) for each in everyone} & schedule.backward_set
        recomputed = [Op("R", b, s)] if ("R", b, s) in again else []
        if apart or gathered or b in schedule.joint:
            return recomputed + [Op("wait", b, s, "BC") if gathered else Op("BC", b, each) for each in everyone]
        return [
            *_combined_backward_needs(b, s, schedule)[:1],
            *recomputed,
            *_combined_backward_needs(b, s, schedule)[1:],
        ]
    return _combined_backward_needs(b, s, schedule)


def _made_by(op: Op, schedule: Schedule) -> Op:
    """The op that makes what `op` stands for: a joint block makes every sub-batch's part at once."""
    joint = op.block in schedule.joint and op.kind in _ONCE
    return Op(op.kind, op.block, 0) if joint else op


def _combined_backward_needs(b: int, s: int, schedule: Schedule) -> list[Op]:
    """What the backward of C reads: its graph, kept or made again, and the gradient of the next block's input."""
    combined = Op("RC" if ("RC", b, s) in schedule.recomputed else "C", b, s)
    return [combined] + ([Op("wait", b + 1, s, "B")] if b < schedule.num_blocks - 1 else [])


def required(schedule: Schedule) -> Iterator[Op]:
    """The ops that the list must hold for the step to be whole."""
    gathered = schedule.sequence_parallel
    reduce: Collective = "reduce_scatter" if gathered else "all_reduce"
    kinds: list[tuple[Compute | Collective, Compute | None]] = [
        ("F", None),
        (reduce, "F"),
        ("wait", "F"),
        ("C", None),
    ]
    if gathered:
        kinds += [("all_gather", "C"), ("wait", "C")]
    if schedule.backward:
        kinds += [("BC", None), ("all_gather", "BC"), ("wait", "BC")] if gathered else []
        kinds += [("B", None), (reduce, "B"), ("wait", "B")]
    for b in range(schedule.num_blocks):
        for s in range(schedule.num_sub_batches):
            for kind, of in kinds:
                if s == 0 or kind not in _ONCE or b not in schedule.joint:
                    yield Op(kind, b, s, of)


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError, naming op and line, unless every rank can run `schedule` to the end."""
    if schedule.num_blocks < 1 or schedule.num_sub_batches < 1:
        raise ScheduleError(
            f"a schedule needs at least 1 block and 1 sub-batch, got {schedule.num_blocks} and "
            f"{schedule.num_sub_batches}"
        )
    _require_one_kind_of_cut(schedule)
    done: dict[Op, int] = {}
    backward_since: int | None = None
    for line, op in enumerate(schedule, start=1):
        _require_possible(op, f"op {line} ({op})", schedule, done)
        if op.in_backward:
            backward_since = backward_since or line
        elif backward_since is not None:
            raise ScheduleError(
                f"op {line} ({op}): a forward op after the backward pass began with op {backward_since}; the "
                "loss needs the whole forward pass first"
            )
        done[op] = line
    _require_recompute_as_said(schedule)
    for op in required(schedule):
        if op not in done:
            raise ScheduleError(f"'{op}' is missing: the step would not be whole without it")


def _require_recompute_as_said(schedule: Schedule) -> None:
    blocks = schedule.recomputed_blocks
    extent = "none" if not blocks else "full" if len(blocks) == schedule.num_blocks else "some"
    if extent != schedule.recompute and schedule.backward:
        raise ScheduleError(
            f"the header says recompute={schedule.recompute}, but the list holds "
            + (f"ops R of {len(blocks)} of {schedule.num_blocks} blocks" if blocks else "no op R")
        )


def _require_one_kind_of_cut(schedule: Schedule) -> None:
    if schedule.joint and schedule.along != "sequence":
        raise ScheduleError("joint blocks are for sub-batches along=sequence; samples are independent")
    if schedule.joint and not max(schedule.joint) < schedule.num_blocks:
        raise ScheduleError(f"joint block {max(schedule.joint)} is beyond the {schedule.num_blocks} blocks")
    if schedule.along == "sequence" and schedule.sequence_parallel:
        raise ScheduleError("sub-batches along=sequence cannot be sequence-parallel besides; cut the batch")
    if schedule.joint and any(kind == "RC" for kind, _, _ in schedule.recomputed):
        raise ScheduleError("op RC cannot be in a list with joint blocks: what C made is kept there")


def _require_possible(op: Op, where: str, schedule: Schedule, done: dict[Op, int]) -> None:
    """Raise ScheduleError unless `op` can run after the ops in `done` (op -> line)."""
    if not (0 <= op.block < schedule.num_blocks and 0 <= op.sub_batch < schedule.num_sub_batches):
        raise ScheduleError(
            f"{where}: the schedule has {schedule.num_blocks} blocks and {schedule.num_sub_batches} "
            "sub-batches, counted from 0"
        )
    _require_meaning(op, where, schedule)
    if op in done:
        raise ScheduleError(f"{where}: done twice, first as op {done[op]}")
    for need in needs(op, schedule):
        if need in done:
            continue
        if need.kind == "wait" and schedule.starts.get(need.carried) in done:
            raise ScheduleError(f"{where}: uses the result of {need.carried} before '{need}'")
        if op.kind == "wait":
            raise ScheduleError(f"{where}: waits for a collective that was not started by '{need}'")
        raise ScheduleError(f"{where}: its input is missing; '{need}' must come before it")


def _require_meaning(op: Op, where: str, schedule: Schedule) -> None:
    """Raise ScheduleError for a collective of what needs none, or a part of what runs whole."""
    if op.kind in STARTS and schedule.starts[op.carried] != op:
        raise ScheduleError(
            f"{where}: the result of {op.carried} is carried twice, besides by {schedule.starts[op.carried]}"
        )
    if op.kind in ("all_reduce", "reduce_scatter") and op.of not in ("F", "R", "B"):
        raise ScheduleError(f"{where}: the result of {op.of} is whole; only F, R and B leave partial sums")
    if op.kind == "all_gather" and op.of not in ("C", "RC", "BC"):
        raise ScheduleError(f"{where}: only C, RC and BC make parts of the sequence, to be gathered")
    if op.kind == "all_reduce" and schedule.sequence_parallel:
        raise ScheduleError(f"{where}: the list is sequence-parallel, so sums are scattered; use reduce_scatter")
    if op.kind in _ONCE and op.sub_batch and op.block in schedule.joint:
        raise ScheduleError(f"{where}: block {op.block} is joint, so its {op.kind} runs once, as sub-batch 0")


def validate_ranks(schedules: Sequence[Schedule]) -> None:
    """Raise ScheduleError unless all ranks' lists can run and issue the same collectives in the same order.

    A different order would hang, or sum tensors that do not belong together.
    """
    for rank, schedule in enumerate(schedules):
        try:
            validate(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}: {error}") from error
        pairs = zip_longest(schedules[0].collectives, schedule.collectives)
        for position, (first, other) in enumerate(pairs, start=1):
            if first != other:
                raise ScheduleError(
                    f"collective {position} is '{first or 'none'}' on rank 0 but '{other or 'none'}' on rank "
                    f"{rank}; all ranks must issue the same collectives in the same order"
                )
