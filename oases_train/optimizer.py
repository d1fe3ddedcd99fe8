"""AdamW of a training run: its parameter groups, precision and sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oases.distributed.optimizer import make_optimizer
from oases.distributed.precision import needs_of, set_needs

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}
WEIGHT_DECAY = 0.1
"""Decay of matrices; vectors have none."""

PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of weights and activations."""


def adamw(model: nn.Module, precision: str, *, learning_rate: float) -> torch.optim.Optimizer:
    """Make AdamW for a model on its device, and convert its weights to `precision`, unless `parallelize` has done so.

    In bfloat16 it keeps float32 master weights and gradients; shards of FSDP and ZeRO are their own masters.
    """
    if needs_of(model) is None:
        set_needs(model, zero=False, dtype=None if precision == "float32" else PRECISIONS[precision])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = weight_decay_groups(trained)
    return make_optimizer(model, torch.optim.AdamW, params=groups, lr=learning_rate, **OPTIONS)


def weight_decay_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups of AdamW: weight decay for matrices only."""
    # A fused update takes plain tensors, or FSDP2 shards of a single mesh.
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() < 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [
        {"params": found, "weight_decay": 0.0 if is_vector else WEIGHT_DECAY}
        for (is_vector, _), found in sorted(groups.items(), key=lambda group: group[0][0])
    ]
