"""AdamW of a training run of the built-in GPT: its parameter groups, precision and sharding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from oases.execution.group import ProcessGroup
from oases.parallel.optimizer import ShardedOptimizer

Parts = Iterable[tuple[list[nn.Parameter], ProcessGroup | None]]
"""Parameters, and the data-parallel group of ranks that hold the same ones."""
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}

PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of weights and activations."""


def adamw(
    parts: Parts, precision: str, *, learning_rate: float, weight_decay: float, sharded: bool = False
) -> torch.optim.Optimizer:
    """Make AdamW for all `parts` of a float32 model (see `GPT.parts`), and convert the model to `precision`.

    In bfloat16 it keeps float32 master weights and gradients. sharded: as in ZeRO-1, over the group of each part.
    Call it with the model on its final device, before anything depends on the parameters' dtypes.
    """
    group_of = {parameter: group for parameters, group in parts for parameter in parameters}
    groups = weight_decay_groups(list(group_of), weight_decay)
    options = {"lr": learning_rate, **OPTIONS}
    if precision == "float32" and not sharded:
        return torch.optim.AdamW(groups, **options)
    return ShardedOptimizer(
        groups,
        torch.optim.AdamW,
        data_parallel=group_of.__getitem__ if sharded else None,
        master_weights=True,
        dtype=PRECISIONS[precision],
        **options,
    )


def weight_decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of AdamW: weight decay for matrices only."""
    # A fused update takes plain tensors, or FSDP2 shards of a single mesh.
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() < 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [
        {"params": found, "weight_decay": 0.0 if is_vector else weight_decay}
        for (is_vector, _), found in sorted(groups.items(), key=lambda group: group[0][0])
    ]
