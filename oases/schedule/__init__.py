"""What runs when: schedules as plain data. Imports no torch."""

from oases.schedule.ir import Op, Schedule, ScheduleError
from oases.schedule.tensor import GENERATORS, generate, oases, sync
from oases.schedule.text import ScheduleSyntaxError, format_schedule, parse_schedule
from oases.schedule.validate import validate, validate_ranks

__all__ = [
    "GENERATORS",
    "Op",
    "Schedule",
    "ScheduleError",
    "ScheduleSyntaxError",
    "format_schedule",
    "generate",
    "oases",
    "parse_schedule",
    "sync",
    "validate",
    "validate_ranks",
]
