"""AdamW for a training run, plain or with its state sharded over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from oases.execution.group import ProcessGroup, group_name, group_size

Parts = Iterable[tuple[list[nn.Parameter], ProcessGroup | None]]
"""Parameters and the ranks that hold the same ones."""
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}


class ShardedAdamW:
    """AdamW whose state lies on one rank of each data-parallel group, which updates for all of them.

    parts: (parameters, data-parallel group); one torch ZeroRedundancyOptimizer for each group, a plain AdamW for
    what has no replicas. It has what a loop asks of an optimizer: param_groups, step, zero_grad.
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
                # Here, because its package compiles things that nobody else needs.
                from torch.distributed.optim import ZeroRedundancyOptimizer

                optimizer = ZeroRedundancyOptimizer(
                    groups, torch.optim.AdamW, process_group=group, lr=learning_rate, **OPTIONS
                )
                local = optimizer.optim
            self._optimizers.append(optimizer)
            self._here |= {parameter: local for mine in local.param_groups for parameter in mine["params"]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parts; a learning rate written there holds from the next step on."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers))

    def step(self) -> None:
        """Update each parameter on its rank and send it to the others."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """The state of a parameter, None where another rank has it."""
        if parameter not in self._here:
            return None
        state: dict[str, Any] = self._here[parameter].state[parameter]
        return state


@runtime_checkable
class HasMasterWeights(Protocol):
    """An optimizer whose weights are others than the model's, of a wider type; see `oases.train.master_weights`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...  # noqa: D102

    def step(self) -> None: ...  # noqa: D102

    def zero_grad(self) -> None: ...  # noqa: D102

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any] | None: ...  # noqa: D102

    def master_of(self, parameter: nn.Parameter) -> Tensor | None: ...  # noqa: D102

    def copy_masters_to_model(self) -> None: ...  # noqa: D102


Optimizer = torch.optim.AdamW | ShardedAdamW | HasMasterWeights


def adamw(parts: Parts, *, learning_rate: float, weight_decay: float, sharded: bool = False) -> Optimizer:
    """AdamW over all `parts` of a model (see `GPT.parts`); sharded: with its state spread over their groups."""
    if sharded:
        return ShardedAdamW(parts, learning_rate=learning_rate, weight_decay=weight_decay)
    parameters = [parameter for part, _ in parts for parameter in part]
    return torch.optim.AdamW(weight_decay_groups(parameters, weight_decay), lr=learning_rate, **OPTIONS)


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    """What an optimizer keeps of a parameter, empty before its first step; None where another rank keeps it."""
    if isinstance(optimizer, ShardedAdamW | HasMasterWeights):
        return optimizer.state_of(parameter)
    state: dict[str, Any] = optimizer.state[parameter]
    return state


def weight_of(optimizer: Optimizer | None, parameter: nn.Parameter) -> Tensor | None:
    """The weight that an optimizer updates, the parameter or its master; None where another rank keeps that."""
    return optimizer.master_of(parameter) if isinstance(optimizer, HasMasterWeights) else parameter


def weight_decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: weight decay is of matrices alone."""
    # A fused update takes either shards of FSDP2 or plain tensors, and shards of one mesh alone.
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() < 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [
        {"params": found, "weight_decay": 0.0 if is_vector else weight_decay}
        for (is_vector, _), found in sorted(groups.items(), key=lambda group: group[0][0])
    ]
