"""Proves that a schedule can run: every input there, every wait after its start, all ranks in one order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from oases.schedule.ir import Op, Schedule, ScheduleError


def needs(op: Op, schedule: Schedule) -> list[Op]:
    """The ops that must come before `op`: the data it reads."""
    b, s = op.block, op.sub_batch
    last = schedule.num_blocks - 1
    if op.kind == "all_reduce":
        return [op.carried]
    if op.kind == "wait":
        assert op.of is not None
        return [Op("all_reduce", b, s, op.of)]
    if op.kind == "F":
        return [Op("C", b - 1, s)] if b > 0 else []
    if op.kind == "C":
        return [Op("wait", b, s, "F")]
    again = schedule.recomputed
    if op.kind == "R":
        return [Op("F", b, s)]  # its input was kept, unless an RC made it again first
    if op.kind == "RC":
        return [Op("wait", b, s, "R")]
    if op.kind == "W":
        return [Op("B", b, s)]
    # B: the gradient of the next block's input, and the graphs of its own forward, kept or made again.
    gradient = [Op("wait", b + 1, s, "B")] if b < last else []
    combined = [Op("RC" if ("RC", b, s) in again else "C", b, s)]
    return combined + ([Op("R", b, s)] if ("R", b, s) in again else []) + gradient


def required(schedule: Schedule) -> Iterator[Op]:
    """The ops that the list must hold for the step to be whole."""
    kinds: list[tuple[str, str | None]] = [("F", None), ("all_reduce", "F"), ("wait", "F"), ("C", None)]
    if schedule.backward:
        kinds += [("B", None), ("all_reduce", "B"), ("wait", "B")]
    for b in range(schedule.num_blocks):
        for s in range(schedule.num_sub_batches):
            for kind, of in kinds:
                yield Op(kind, b, s, of)  # type: ignore[arg-type]


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError, naming op and line, unless every rank can run `schedule` to the end."""
    if schedule.num_blocks < 1 or schedule.num_sub_batches < 1:
        raise ScheduleError(
            f"a schedule needs at least 1 block and 1 sub-batch, got {schedule.num_blocks} and "
            f"{schedule.num_sub_batches}"
        )
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
    again = {kind for kind, _, _ in schedule.recomputed}
    if ("R" in again) != (schedule.recompute == "full") and schedule.backward:
        raise ScheduleError(
            f"the header says recompute={schedule.recompute}, but the list "
            + ("holds ops R" if "R" in again else "holds no op R")
        )
    for op in required(schedule):
        if op not in done:
            raise ScheduleError(f"'{op}' is missing: the step would not be whole without it")


def _require_possible(op: Op, where: str, schedule: Schedule, done: dict[Op, int]) -> None:
    """Raise ScheduleError unless `op` can run after the ops in `done` (op -> line)."""
    if not (0 <= op.block < schedule.num_blocks and 0 <= op.sub_batch < schedule.num_sub_batches):
        raise ScheduleError(
            f"{where}: the schedule has {schedule.num_blocks} blocks and {schedule.num_sub_batches} "
            "sub-batches, counted from 0"
        )
    if op.of is not None and op.of not in ("F", "R", "B"):
        raise ScheduleError(f"{where}: the result of {op.of} is whole; only F, R and B leave partial sums")
    if op in done:
        raise ScheduleError(f"{where}: done twice, first as op {done[op]}")
    for need in needs(op, schedule):
        if need in done:
            continue
        if need.kind == "wait" and Op("all_reduce", need.block, need.sub_batch, need.of) in done:
            raise ScheduleError(f"{where}: uses the result of {need.carried} before '{need}'")
        if op.kind == "wait":
            raise ScheduleError(f"{where}: waits for a collective that was not started by '{need}'")
        raise ScheduleError(f"{where}: its input is missing; '{need}' must come before it")


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
