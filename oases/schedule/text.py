"""The text form of a schedule: a header and one op a line, written and read back without loss.

schedule oases blocks=1 sub_batches=2 recompute=none
F 0.0                 # block 0, sub-batch 0
all_reduce F 0.0      # start summing its result over the ranks
wait F 0.0
"""

from __future__ import annotations

import re
from typing import Any, cast

from oases.schedule.ir import COLLECTIVE, COMPUTE, Op, Schedule, ScheduleError

_HEADER = re.compile(
    r"schedule\s+(?P<name>[\w.-]+)\s+blocks=(?P<blocks>\d{1,6})\s+sub_batches=(?P<sub_batches>\d{1,6})"
    r"(\s+recompute=(?P<recompute>none|some|full))?"
    r"(\s+along=(?P<along>batch|sequence))?"
    r"(\s+joint=(?P<joint>\d{1,6}(,\d{1,6})*))?$"
)
_PLACE = re.compile(r"(?P<block>\d{1,6})\.(?P<sub_batch>\d{1,6})$")


class ScheduleSyntaxError(ScheduleError):
    """A schedule text that cannot be read. `line` and `column` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


def format_schedule(schedule: Schedule) -> str:
    """Write `schedule` as text, one op a line."""
    header = (
        f"schedule {schedule.name} blocks={schedule.num_blocks} "
        f"sub_batches={schedule.num_sub_batches} recompute={schedule.recompute}"
    )
    if schedule.along == "sequence":
        header += " along=sequence"
    if schedule.joint:
        header += f" joint={','.join(map(str, sorted(schedule.joint)))}"
    return "\n".join([header, *map(str, schedule.ops)]) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Read a schedule from its text form. Blank lines and `#` comments are skipped.

    Raises ScheduleSyntaxError with line and column. Does not check that the schedule can run: see `validate`.
    """
    header: re.Match[str] | None = None
    ops: list[Op] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].rstrip()
        if not line.strip():
            continue
        if header is None:
            header = _HEADER.match(line.strip())
            if header is None:
                raise ScheduleSyntaxError(
                    f"expected the header 'schedule NAME blocks=N sub_batches=N [recompute=none|some|full] "
                    f"[along=batch|sequence] [joint=N,N,...]', "
                    f"got {line.strip()!r}",
                    number,
                    line.index(line.strip()) + 1,
                )
        else:
            ops.append(_parse_op(line, number))
    if header is None:
        raise ScheduleSyntaxError("the text holds no schedule: its header is missing", 1, 1)
    return Schedule(
        name=header["name"],
        num_blocks=int(header["blocks"]),
        num_sub_batches=int(header["sub_batches"]),
        ops=tuple(ops),
        recompute=cast(Any, header["recompute"] or "none"),
        along=cast(Any, header["along"] or "batch"),
        joint=frozenset(int(block) for block in (header["joint"] or "").split(",") if block),
    )


def _parse_op(line: str, number: int) -> Op:
    words = [(match.group(), match.start() + 1) for match in re.finditer(r"\S+", line)]

    def word(index: int, expected: str) -> tuple[str, int]:
        if index >= len(words):
            raise ScheduleSyntaxError(f"expected {expected}, got the end of the line", number, len(line) + 1)
        return words[index]

    kind, column = words[0]
    if kind not in COMPUTE + COLLECTIVE:
        raise ScheduleSyntaxError(f"unknown op {kind!r}; known are {', '.join(COMPUTE + COLLECTIVE)}", number, column)
    of = None
    if kind in COLLECTIVE:
        of, column = word(1, f"the op whose result '{kind}' carries, one of {', '.join(COMPUTE)}")
        if of not in COMPUTE:
            raise ScheduleSyntaxError(
                f"'{kind}' carries a compute op ({', '.join(COMPUTE)}), not {of!r}", number, column
            )
    place_at = 1 if of is None else 2
    place, column = word(place_at, "BLOCK.SUB_BATCH, e.g. 3.1")
    match = _PLACE.match(place)
    if match is None:
        raise ScheduleSyntaxError(f"expected BLOCK.SUB_BATCH, e.g. 3.1, got {place!r}", number, column)
    if len(words) > place_at + 1:
        extra, column = words[place_at + 1]
        raise ScheduleSyntaxError(f"nothing may follow the op, got {extra!r}", number, column)
    return Op(cast(Any, kind), int(match["block"]), int(match["sub_batch"]), cast(Any, of))
