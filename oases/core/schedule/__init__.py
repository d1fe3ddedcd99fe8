"""Schedules as plain data: ops, generators, text form and validation. Imports no torch."""

from oases.core.schedule.exchange import exchanging
from oases.core.schedule.experts import EXPERT_SCHEDULES, generate_experts, resolve_experts
from oases.core.schedule.ops import OPS, Op, ScheduleError, Unit
from oases.core.schedule.pipeline import PIPELINES, generate_pipeline, gpipe, one_f_one_b, resolve_pipeline
from oases.core.schedule.schedule import Schedule
from oases.core.schedule.sequence import along_sequence, sequence_parallel
from oases.core.schedule.tensor import (
    AUTO,
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
from oases.core.schedule.text import (
    ScheduleSyntaxError,
    format_schedule,
    from_text,
    is_text,
    name_or_text,
    parse_schedule,
    read_schedule,
)
from oases.core.schedule.validate import validate, validate_ranks

__all__ = [
    "AUTO",
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
