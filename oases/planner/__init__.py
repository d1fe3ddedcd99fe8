"""Planner: searches for the fastest parallelisation of a model on a cluster. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oases.errors import UsageError
from oases.planner.choose import NoPlanError, rank_plans
from oases.planner.predict import Predictor
from oases.planner.space import Space
from oases.plans.check import require_trainable
from oases.plans.gpt import MODELS, gpt, model_called, resized
from oases.plans.layered import Model
from oases.plans.plan import Plan, Prediction, Segment, Stage
from oases.simulator.cluster import cluster_called
from oases.simulator.hardware import Hardware

__all__ = ["NoPlanError", "Plan", "Prediction", "Predictor", "Segment", "Space", "Stage", "plan", "rank_plans"]

Cluster = str | tuple[Hardware, int]
"""A cluster by name, such as "64x3090" or "2x8x3090", or the hardware of a profile and the number of ranks."""


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

    model: a Model, a name ("gpt-1.3b"), a path (a config.json of transformers, or a folder with one), a
    transformers configuration or model, or an object with hidden, layers, heads and sequence such as a GPTConfig.
    Models are traced on `meta`, and their own layers are planned (`trace_layers`).
    global_batch: samples per optimizer step. sequence: tokens per sample, instead of the model's. budget: bytes of
    memory per rank. Raises UsageError, and NoPlanError, which names changes that would fit.
    """
    hardware, world = cluster_called(cluster) if isinstance(cluster, str) else cluster
    shape = model_of(model, sequence)
    require_trainable(shape)
    return rank_plans(shape, hardware, world, global_batch, budget=budget, space=space)[0]


def model_of(
    model: Any,
    sequence: int | None = None,
    dtype: str | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> Model:
    """Convert any model that `plan` takes to what is searched.

    sequence: tokens per sample; dtype: None for the model's own. on_layer(done, total): progress of tracing.
    """
    given = {name: value for name, value in (("sequence", sequence), ("dtype", dtype)) if value is not None}
    if isinstance(model, Model) and model.sizes is not None:
        return resized(model, **given)
    if isinstance(model, Model):
        if sequence not in (None, model.sequence):
            raise UsageError(
                f"model {model.name} was traced for a sequence of {model.sequence}, got {sequence}; trace it again"
            )
        return model if dtype in (None, model.dtype) else model.in_dtype(str(dtype))
    named = isinstance(model, str) and model not in MODELS and ("/" in model or Path(model).exists())
    if named or isinstance(model, Path) or hasattr(model, "model_type"):
        from oases.autotp.costs import trace_configuration

        return trace_configuration(model, sequence=sequence, dtype=dtype or "float32", on_layer=on_layer)
    if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        from oases.autotp.costs import trace_layers

        found = trace_layers(model, sequence=sequence, on_layer=on_layer)
        return found if dtype in (None, found.dtype) else found.in_dtype(str(dtype))
    return resized(_gpt_of(model), **given)


def _gpt_of(model: Any) -> Model:
    if isinstance(model, str):
        return model_called(model)
    names = ("hidden", "layers", "heads", "sequence", "vocabulary")
    missing = [name for name in names[:4] if not isinstance(getattr(model, name, None), int)]
    if missing:
        raise UsageError(
            f"model {type(model).__name__} has no {', '.join(missing)}; give a name such as gpt-1.3b, a path, "
            "or a configuration with hidden, layers, heads and sequence"
        )
    return gpt(**{name: getattr(model, name) for name in names if hasattr(model, name)})
