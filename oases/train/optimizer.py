"""AdamW for a training run, replicated or with state sharded over data-parallel ranks (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from oases.execution.group import ProcessGroup, group_name, group_size

Parts = Iterable[tuple[list[nn.Parameter], ProcessGroup | None]]
"""Parameters, and the data-parallel group of ranks that hold the same ones."""
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}


class ShardedAdamW:
    """AdamW with state sharded over each data-parallel group (ZeRO-1).

    parts: (parameters, data-parallel group); one torch ZeroRedundancyOptimizer per group, and a plain AdamW for
    parameters without replicas. Has the optimizer API of a training loop: param_groups, step, zero_grad.
    """

    def __init__(self, parts: Parts, *, learning_rate: float, weight_decay: float) -> None:
        by_group: dict[str, tuple[ProcessGroup | None, list[nn.Parameter]]] = {}
        for parameters, group in parts:
            shared = group if group_size(group) > 1 else None
            by_group.setdefault(group_name(shared), (shared, []))[1].extend(parameters)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._here: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for group, parameters in by_group.values():
            groups = weight_decay_groups(parameters, weight_decay)
            optimizer: Any
            if group is None:
                optimizer = local = torch.optim.AdamW(groups, lr=learning_rate, **OPTIONS)
            else:
                # Imported here: its package compiles TorchScript at import, which takes time.
                from torch.distributed.optim import ZeroRedundancyOptimizer

                optimizer = ZeroRedundancyOptimizer(
                    groups, torch.optim.AdamW, process_group=group, lr=learning_rate, **OPTIONS
                )
                local = optimizer.optim
            self._optimizers.append(optimizer)
            self._here |= {parameter: local for mine in local.param_groups for parameter in mine["params"]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all parts; a new learning rate takes effect in the next step."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers))

    def step(self) -> None:
        """Update each parameter on its rank and broadcast it."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """AdamW state of a parameter; None where another rank has it."""
        if parameter not in self._here:
            return None
        state: dict[str, Any] = self._here[parameter].state[parameter]
        return state


@runtime_checkable
class HasMasterWeights(Protocol):
    """Optimizer with float32 master weights; see `oases.train.master_weights`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...  # noqa: D102

    def step(self) -> None: ...  # noqa: D102

    def zero_grad(self) -> None: ...  # noqa: D102

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any] | None: ...  # noqa: D102

    def master_of(self, parameter: nn.Parameter) -> Tensor | None: ...  # noqa: D102

    def copy_masters_to_model(self) -> None: ...  # noqa: D102


Optimizer = torch.optim.AdamW | ShardedAdamW | HasMasterWeights


def adamw(parts: Parts, *, learning_rate: float, weight_decay: float, sharded: bool = False) -> Optimizer:
    """Make AdamW for all `parts` of a model (see `GPT.parts`). sharded: as in ZeRO-1."""
    if sharded:
        return ShardedAdamW(parts, learning_rate=learning_rate, weight_decay=weight_decay)
    parameters = [parameter for part, _ in parts for parameter in part]
    return torch.optim.AdamW(weight_decay_groups(parameters, weight_decay), lr=learning_rate, **OPTIONS)


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    """AdamW state of a parameter, empty before the first step; None where another rank has it."""
    if isinstance(optimizer, ShardedAdamW | HasMasterWeights):
        return optimizer.state_of(parameter)
    state: dict[str, Any] = optimizer.state[parameter]
    return state


def weight_of(optimizer: Optimizer | None, parameter: nn.Parameter) -> Tensor | None:
    """Weight that the optimizer updates: the parameter, or its master; None where another rank has that."""
    return optimizer.master_of(parameter) if isinstance(optimizer, HasMasterWeights) else parameter


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
