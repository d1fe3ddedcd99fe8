"""Text form of a schedule: a header and one op per line, read back without loss.

schedule oases blocks=1 sub_batches=2 recompute=none
F 0.0                 # block 0, sub-batch 0
all_reduce F 0.0      # start the all-reduce of its result
wait F 0.0

The first word of the header is the unit: `schedule` for tensor-parallel blocks, `experts`, or `pipeline`, whose ops
are sorted by stage and named PART.MICRO_BATCH.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from oases.core.schedule.ops import OPS, TRANSFERS, Op, ScheduleError, Unit
from oases.core.schedule.schedule import Schedule
from oases.core.schedule.validate import validate
from oases.limits import short

_NAME = r"(?P<name>[\w.-]+)"
_HEADERS: dict[Unit, tuple[str, re.Pattern[str]]] = {
    "block": (
        "schedule NAME blocks=N sub_batches=N [recompute=none|some|full] [along=batch|sequence] [joint=N,N,...]",
        re.compile(
            rf"schedule\s+{_NAME}\s+blocks=(?P<blocks>\d{{1,6}})\s+sub_batches=(?P<sub_batches>\d{{1,6}})"
            r"(\s+recompute=(?P<recompute>none|some|full))?"
            r"(\s+along=(?P<along>batch|sequence))?"
            r"(\s+joint=(?P<joint>\d{1,6}(,\d{1,6})*))?$"
        ),
    ),
    "experts": (
        "experts NAME blocks=N [recompute=none|full]",
        re.compile(rf"experts\s+{_NAME}\s+blocks=(?P<blocks>\d{{1,6}})(\s+recompute=(?P<recompute>none|full))?$"),
    ),
    "stage": (
        "pipeline NAME stages=N micro_batches=N [chunks=N] [placement=loop|v]",
        re.compile(
            rf"pipeline\s+{_NAME}\s+stages=(?P<stages>\d{{1,6}})\s+micro_batches=(?P<sub_batches>\d{{1,6}})"
            r"(\s+chunks=(?P<chunks>\d{1,6}))?"
            r"(\s+placement=(?P<placement>loop|v))?$"
        ),
    ),
}
_WORDS: dict[str, Unit] = {"schedule": "block", "experts": "experts", "pipeline": "stage"}
_PLACES: dict[Unit, str] = {
    "block": "BLOCK.SUB_BATCH, e.g. 3.1",
    "experts": "BLOCK.SUB_BATCH, e.g. 3.0",
    "stage": "PART.MICRO_BATCH, e.g. 3.1",
}
_PLACE = re.compile(r"(?P<block>\d{1,6})\.(?P<sub_batch>\d{1,6})$")


class ScheduleSyntaxError(ScheduleError):
    """Syntax error in a schedule text. `line` and `column` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


def format_schedule(schedule: Schedule) -> str:
    """Format `schedule` as text, one op per line."""
    if schedule.unit == "stage":
        header = f"pipeline {schedule.name} stages={schedule.num_stages} micro_batches={schedule.num_sub_batches}"
        header += f" chunks={schedule.chunks}" if schedule.chunks > 1 else ""
        header += f" placement={schedule.placement}" if schedule.placement != "loop" else ""
    elif schedule.unit == "experts":
        header = f"experts {schedule.name} blocks={schedule.num_blocks} recompute={schedule.recompute}"
    else:
        header = (
            f"schedule {schedule.name} blocks={schedule.num_blocks} "
            f"sub_batches={schedule.num_sub_batches} recompute={schedule.recompute}"
        )
    if schedule.along == "sequence":
        header += " along=sequence"
    if schedule.joint:
        header += f" joint={','.join(map(str, sorted(schedule.joint)))}"
    return "\n".join([header, *map(str, schedule.ops)]) + "\n"


def lines_of(text: str) -> list[tuple[int, str]]:
    """Lines with content, with their numbers and without comments."""
    numbered = ((number, raw.split("#", 1)[0].rstrip()) for number, raw in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in numbered if line.strip()]


def parse_schedule(text: str) -> Schedule:
    """Parse the text form of a schedule. Blank lines and `#` comments are skipped.

    Raises ScheduleSyntaxError with line and column. Does not check that the schedule can run: see `validate`.
    """
    lines = lines_of(text)
    if not lines:
        raise ScheduleSyntaxError("the text holds no schedule: its header is missing", 1, 1)
    (number, line), *rest = lines
    unit = _WORDS.get(line.split()[0], "block")
    expected, pattern = _HEADERS[unit]
    found = pattern.match(line.strip())
    if found is None:
        column = line.index(line.strip()) + 1
        others = "" if line.split()[0] in _WORDS else " (or experts ..., pipeline ...)"
        raise ScheduleSyntaxError(
            f"expected the header '{expected}'{others}, got {short(line.strip())}", number, column
        )
    header = found.groupdict()
    kinds = tuple(name for name, row in OPS.items() if unit in row.reads)
    ops = tuple(_parse_op(line, number, unit, kinds) for number, line in rest)
    stages = int(header.get("stages") or 1)
    blocks = int(header.get("blocks") or stages * int(header.get("chunks") or 1))
    if unit == "stage" and not blocks:
        raise ScheduleSyntaxError("a pipeline has at least 1 stage with 1 model part", number, 1)
    schedule = Schedule(
        name=header["name"],
        num_blocks=blocks,
        num_sub_batches=int(header.get("sub_batches") or 1),
        ops=ops,
        recompute=cast(Any, header.get("recompute") or "none"),
        along=cast(Any, header.get("along") or "batch"),
        joint=frozenset(int(block) for block in (header.get("joint") or "").split(",") if block),
        unit=unit,
        num_stages=stages,
        placement=cast(Any, header.get("placement") or "loop"),
    )
    return replace(schedule, recompute=schedule.extent) if unit == "stage" else schedule


def _parse_op(line: str, number: int, unit: Unit, kinds: tuple[str, ...]) -> Op:
    words = [(match.group(), match.start() + 1) for match in re.finditer(r"\S+", line)]

    def word(index: int, expected: str) -> tuple[str, int]:
        if index >= len(words):
            raise ScheduleSyntaxError(f"expected {expected}, got the end of the line", number, len(line) + 1)
        return words[index]

    kind, column = words[0]
    if unit == "experts" and kind in ("N", "RN", "BN"):
        raise ScheduleSyntaxError(
            f"{kind} of older lists is two ops now, of F in a block and of D in the next one; oases simulate "
            "--schedule NAME --json FILE writes a new list",
            number,
            column,
        )
    if kind not in kinds:
        raise ScheduleSyntaxError(f"unknown op {short(kind)}; known are {', '.join(kinds)}", number, column)
    of = None
    if OPS[kind].stream == "link" and kind not in TRANSFERS:
        carried = [name for name in kinds if OPS[name].stream == "compute"]
        carried += TRANSFERS if kind == "wait" and unit == "experts" else ()
        of, column = word(1, f"the op whose result '{kind}' carries, one of {', '.join(carried)}")
        if of not in carried:
            raise ScheduleSyntaxError(
                f"'{kind}' carries a compute op ({', '.join(carried)}), not {short(of)}", number, column
            )
    place_at = 1 if of is None else 2
    place, column = word(place_at, _PLACES[unit])
    match = _PLACE.match(place)
    if match is None:
        raise ScheduleSyntaxError(f"expected {_PLACES[unit]}, got {short(place)}", number, column)
    if len(words) > place_at + 1:
        extra, column = words[place_at + 1]
        raise ScheduleSyntaxError(f"unexpected text after the op: {short(extra)}", number, column)
    return Op(cast(Any, kind), int(match["block"]), int(match["sub_batch"]), cast(Any, of))


def is_text(schedule: str) -> bool:
    """Whether a string is the text of a schedule rather than a name."""
    return "\n" in schedule


@lru_cache(maxsize=64)
def from_text(text: str, unit: Unit | None) -> Schedule:
    """Parse and validate a text. Raises ScheduleError unless it is a list of `unit` with a backward pass."""
    return trainable(parse_schedule(text), unit)


def trainable(schedule: Schedule, unit: Unit | None) -> Schedule:
    """Return a schedule. Raises ScheduleError unless it is a valid list of `unit` with a backward pass."""
    validate(schedule, unit)
    if not schedule.backward:
        raise ScheduleError("it has no backward pass, which training requires")
    return schedule
