"""Schedules as plain data: ops, generators, text form and validation. Imports no torch."""

from oases.core.schedule.ops import OPS, Op, ScheduleError, Unit
from oases.core.schedule.pipeline import PIPELINES, generate_pipeline, gpipe, one_f_one_b
from oases.core.schedule.schedule import Schedule
from oases.core.schedule.sequence import along_sequence, sequence_parallel
from oases.core.schedule.tensor import AUTO, GENERATORS, WHOLE, LayerOf, Recompute, generate, recomputed_layers

from oases.core.schedule.tensor import cross_pass, fine_grained, oases, sub_pipelined, sync  # isort: skip
from oases.core.schedule.text import ScheduleSyntaxError, format_schedule, from_text, is_text, parse_schedule
from oases.core.schedule.validate import validate

__all__ = [
    "AUTO", "GENERATORS", "OPS", "PIPELINES", "WHOLE", "LayerOf", "Op", "Recompute", "Schedule", "ScheduleError",
    "ScheduleSyntaxError", "Unit", "along_sequence", "cross_pass", "fine_grained", "format_schedule",
    "from_text", "generate", "generate_pipeline", "gpipe", "is_text", "oases", "one_f_one_b", "parse_schedule",
    "recomputed_layers", "sequence_parallel", "sub_pipelined", "sync", "validate",
]  # fmt: skip
