"""A training run as a plan says: the configuration that fits it, and what can be checked before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from oases.errors import UsageError
from oases.parallel.parts import require_runnable
from oases.planner.plan import Plan, read_plan
from oases.train.config import TrainConfig, require_bytes, sizes_of
from oases.train.data import VOCABULARY, TextCorpus

__all__ = ["check", "config_for", "read_plan", "require_fit"]

_SIZES = ("hidden", "layers", "heads", "sequence")
_SAID = ("schedule", "sub_batches", "recompute", "sequence_parallel")


def config_for(plan: Plan, given: Mapping[str, Any]) -> TrainConfig:
    """A configuration of the plan's sizes with the values `given` for the rest.

    UsageError for a given value that the plan says otherwise, and for a schedule, which is the plan's alone.
    """
    for name in _SAID:
        if name in given:
            raise UsageError(
                f"the plan says schedules, recomputation and what is sequence-parallel; leave out {_option(name)}"
            )
    config = TrainConfig(**{**_sizes(plan), **given})
    require_fit(config, plan)
    return config


def require_fit(config: TrainConfig, plan: Plan) -> None:
    """Raise UsageError, naming the field, unless plan and configuration are of the same model and batch."""
    for name, size in _sizes(plan).items():
        if getattr(config, name) != size:
            raise UsageError(
                f"plan: {name} is {size} there and {getattr(config, name)} here; leave out {_option(name)}, or make "
                "a plan for it"
            )
    if not (plan.model.is_gpt and plan.model.tied):
        raise UsageError(f"plan: its model {plan.model.name!r} is no GPT, which is what this trains; plan for a GPT")
    if plan.model.dtype != "float32":
        raise UsageError(f"plan: its model computes in {plan.model.dtype}, training here in float32; plan for that")
    if plan.model.vocabulary < VOCABULARY:
        raise UsageError(f"plan: a vocabulary of {plan.model.vocabulary} is too small; bytes are {VOCABULARY}")


def check(config: TrainConfig, plan: Plan) -> TextCorpus:
    """Everything that can be known before any rank starts; returns the corpus."""
    require_fit(config, plan)
    require_runnable(plan)
    if config.device == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ:
        require_bytes(_bytes_of(plan), f"the plan over its {plan.world} ranks", "take a smaller model")
    return config.check_files(sizes_of(config) | {"vocabulary": plan.model.vocabulary})


def _bytes_of(plan: Plan) -> int:
    """Of weights, gradients and AdamW's two moments of all ranks."""
    total, number = 0.0, 0
    for segment in (segment for part in plan.parts for segment in part.segments):
        replicas = plan.stage_ranks // segment.tp
        copies = 4 / replicas if plan.fsdp else 2 + 2 / (replicas if plan.zero else 1)
        for _ in range(segment.num_blocks):
            total += copies * plan.stage_ranks * plan.model.block_parameters(plan.model.kind_of(number), segment.tp)
            number += 1
    return round(total * plan.model.element_bytes)


def _sizes(plan: Plan) -> dict[str, int]:
    return {name: getattr(plan.model, name) for name in _SIZES} | {"batch": plan.global_batch}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
