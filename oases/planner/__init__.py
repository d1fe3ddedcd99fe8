"""Planner: searches for the fastest parallelisation of a model on a cluster. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph
from oases.graph.shape import shape_of_graph
from oases.planner.choose import NoPlanError, rank_plans
from oases.planner.predict import Predictor
from oases.planner.space import Space
from oases.plans.check import require_trainable
from oases.plans.plan import Plan, Prediction, Segment, Stage
from oases.plans.shape import ModelShape, model_called
from oases.simulator.cluster import cluster_called
from oases.simulator.hardware import Hardware

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
    """Search for the fastest plan that fits the memory and return it with its prediction.

    model: a ModelShape, a name ("gpt-1.3b"), an object with hidden, layers, heads and sequence such as a GPTConfig,
    a LayerGraph, or a transformers model, which is traced; `shape_of_graph` documents the approximations for the
    last two. global_batch: samples per optimizer step. sequence: tokens per sample, instead of the model's. budget:
    bytes of memory per rank. Raises UsageError, and NoPlanError, which names changes that would fit.
    """
    shape = shape_of(model, sequence)
    if sequence is not None:
        shape = replace(shape, sequence=sequence)
    require_trainable(shape)
    hardware, world = cluster_called(cluster) if isinstance(cluster, str) else cluster
    return rank_plans(shape, hardware, world, global_batch, budget=budget, space=space)[0]


def shape_of(model: Any, sequence: int | None = None) -> ModelShape:
    """ModelShape of any model that `plan` takes. sequence: tokens per sample for tracing."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, LayerGraph):
        return shape_of_graph(model)
    if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        from oases.graph.trace import trace

        return shape_of_graph(trace(model, sequence=sequence))
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
