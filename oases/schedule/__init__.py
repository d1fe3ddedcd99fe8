"""Schedules as plain data: ops, generators, text form and validation. Imports no torch."""

from oases.schedule.exchange import exchanging
from oases.schedule.experts import EXPERT_SCHEDULES, generate_experts, resolve_experts
from oases.schedule.ops import OPS, Op, ScheduleError, Unit
from oases.schedule.pipeline import PIPELINES, generate_pipeline, gpipe, one_f_one_b, resolve_pipeline
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
from oases.schedule.text import (
    ScheduleSyntaxError,
    format_schedule,
    from_text,
    is_text,
    name_or_text,
    parse_schedule,
    read_schedule,
)
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
    "exchanging",
    "fine_grained",
    "format_schedule",
    "from_text",
    "generate",
    "generate_experts",
    "generate_pipeline",
    "gpipe",
    "is_text",
    "name_or_text",
    "oases",
    "one_f_one_b",
    "parse_schedule",
    "read_schedule",
    "recomputed_layers",
    "resolve_experts",
    "resolve_pipeline",
    "sequence_parallel",
    "sub_pipelined",
    "sync",
    "validate",
    "validate_ranks",
]
