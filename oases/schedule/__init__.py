"""What runs when: schedules as plain data. Imports no torch."""

from oases.schedule.experts import EXPERT_SCHEDULES, generate_experts
from oases.schedule.ops import OPS, Op, ScheduleError, Unit
from oases.schedule.pipeline import PIPELINES, generate_pipeline, gpipe, one_f_one_b
from oases.schedule.schedule import Schedule
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
from oases.schedule.text import ScheduleSyntaxError, format_schedule, parse_schedule, read_schedule
from oases.schedule.validate import validate, validate_ranks

__all__ = [
    "EXPERT_SCHEDULES",
    "GENERATORS",
    "OPS",
    "PIPELINES",
    "WHOLE",
    "LayerOf",
    "Op",
    "Recompute",
    "Schedule",
    "ScheduleError",
    "ScheduleSyntaxError",
    "Unit",
    "along_sequence",
    "cross_pass",
    "fine_grained",
    "format_schedule",
    "generate",
    "generate_experts",
    "generate_pipeline",
    "gpipe",
    "oases",
    "one_f_one_b",
    "parse_schedule",
    "read_schedule",
    "recomputed_layers",
    "sequence_parallel",
    "sub_pipelined",
    "sync",
    "validate",
    "validate_ranks",
]
