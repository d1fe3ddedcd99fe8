"""What runs when: schedules as plain data. Imports no torch."""

from oases.schedule.ir import Op, Schedule, ScheduleError
from oases.schedule.pipeline import PIPELINES, Pipeline, generate_pipeline, gpipe, one_f_one_b
from oases.schedule.sequence import along_sequence, sequence_parallel
from oases.schedule.tensor import (
    GENERATORS,
    WHOLE,
    LayerOf,
    Recompute,
    cross_pass,
    fine_grained,
    generate,
    oases,
    recomputed_layers,
    sub_pipelined,
    sync,
)
from oases.schedule.text import ScheduleSyntaxError, format_schedule, parse_schedule
from oases.schedule.validate import validate, validate_ranks

__all__ = [
    "GENERATORS",
    "PIPELINES",
    "WHOLE",
    "LayerOf",
    "Op",
    "Pipeline",
    "Recompute",
    "Schedule",
    "ScheduleError",
    "ScheduleSyntaxError",
    "along_sequence",
    "cross_pass",
    "fine_grained",
    "format_schedule",
    "generate",
    "generate_pipeline",
    "gpipe",
    "oases",
    "one_f_one_b",
    "parse_schedule",
    "recomputed_layers",
    "sequence_parallel",
    "sub_pipelined",
    "sync",
    "validate",
    "validate_ranks",
]
