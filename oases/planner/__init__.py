"""Finds the fastest way to train a model on a cluster. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oases.errors import UsageError
from oases.planner.choose import rank_plans
from oases.planner.plan import Plan, Prediction, Segment, Stage
from oases.planner.predict import Predictor
from oases.planner.refusal import NoPlanError
from oases.planner.space import Space, require_runnable
from oases.simulator.cluster import cluster_called
from oases.simulator.hardware import Hardware
from oases.simulator.model import ModelShape, model_called

__all__ = ["NoPlanError", "Plan", "Prediction", "Predictor", "Segment", "Space", "Stage", "plan", "rank_plans"]

Cluster = str | tuple[Hardware, int]
"""A cluster by name, such as "64x3090", or the hardware of a profile and the number of ranks."""


def plan(
    model: Any,
    cluster: Cluster,
    *,
    global_batch: int,
    sequence: int | None = None,
    budget: int | None = None,
    space: Space | None = None,
) -> Plan:
    """The fastest plan that fits, with what is predicted of it.

    model: a ModelShape, the name of one ("gpt-1.3b"), or anything with hidden, layers, heads and sequence, such as a
    GPTConfig. global_batch: samples of one optimizer step. sequence: tokens per sample, in place of the model's.
    budget: bytes that a rank may fill. Raises NoPlanError, which says what would fit, and UsageError.
    """
    shape = shape_of(model)
    if sequence is not None:
        shape = replace(shape, sequence=sequence)
    require_runnable(shape)
    hardware, world = cluster_called(cluster) if isinstance(cluster, str) else cluster
    return rank_plans(shape, hardware, world, global_batch, budget=budget, space=space)[0]


def shape_of(model: Any) -> ModelShape:
    """The sizes of a model given in any way that `plan` takes."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, str):
        return model_called(model)
    names = ("hidden", "layers", "heads", "sequence", "vocabulary")
    missing = [name for name in names[:4] if not isinstance(getattr(model, name, None), int)]
    if missing:
        raise UsageError(
            f"model {type(model).__name__} has no {', '.join(missing)}; give a ModelShape, a name such as gpt-1.3b, "
            "or a configuration with hidden, layers, heads and sequence"
        )
    return ModelShape(**{name: getattr(model, name) for name in names if hasattr(model, name)})
