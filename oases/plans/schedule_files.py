"""Schedules in files, for options that take a generator's name or a path."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from oases.core.schedule import Schedule, ScheduleError, ScheduleSyntaxError, Unit, format_schedule, parse_schedule
from oases.core.schedule.text import lines_of, trainable
from oases.errors import UsageError
from oases.files import read_text

_MOST_BYTES = 2**23


def read_schedule(
    path: str | Path, unit: Unit | None, *, num_blocks: int | None = None, num_stages: int | None = None,
    num_sub_batches: int | None = None,
) -> Schedule:  # fmt: skip
    """Read a schedule of the given unit, None for any, from a file and validate it.

    num_blocks, num_stages, num_sub_batches: required sizes, None for any; of a pipeline the model parts, stages and
    micro-batches. Raises ScheduleError with file, line and reason.
    """
    file = f"schedule file {str(path)!r}"
    try:
        text = read_text(path, "schedule file", "oases simulate --help says what it holds", _MOST_BYTES)
    except UsageError as error:
        raise ScheduleError(str(error)) from error
    try:
        schedule = parse_schedule(text)
        if unit in (None, schedule.unit):
            _require_sizes(schedule, num_blocks, num_stages, num_sub_batches)
        return trainable(schedule, unit)
    except ScheduleSyntaxError as error:
        raise ScheduleError(f"{file}, {error}") from error
    except ScheduleError as error:
        lines = [number for number, _ in lines_of(text)]
        at = f"{lines[-1]}, where the file ends" if error.op_line is None else lines[error.op_line]
        raise ScheduleError(f"{file}, line {at}: {error}", error.op_line) from error


def name_or_text(
    value: str, names: Collection[str], unit: Unit, *, num_blocks: int | None = None, num_stages: int | None = None,
    num_sub_batches: int | None = None,
) -> str:  # fmt: skip
    """Return the name of a generator unchanged, or the text in the file at the path `value`.

    Sizes and errors are those of `read_schedule`; raises ScheduleError for a value that is neither a name nor a
    file.
    """
    if value in names:
        return value
    if not Path(value).is_file():
        raise ScheduleError(f"{value!r} is unknown; known are {', '.join(names)}, or a schedule file's path")
    return format_schedule(
        read_schedule(value, unit, num_blocks=num_blocks, num_stages=num_stages, num_sub_batches=num_sub_batches)
    )


def _require_sizes(
    schedule: Schedule, num_blocks: int | None, num_stages: int | None, num_sub_batches: int | None
) -> None:
    stages = schedule.unit == "stage"
    for what, has, wanted in (
        ("stages", schedule.num_stages, num_stages),
        ("model parts" if stages else "blocks", schedule.num_blocks, num_blocks),
        ("micro-batches" if stages else "sub-batches", schedule.num_sub_batches, num_sub_batches),
    ):
        if wanted is not None and has != wanted:
            raise ScheduleError(f"it is for {has} {what}, but {wanted} are required", 0)
