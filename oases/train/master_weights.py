"""Mixed precision with master weights: model weights and activations in bfloat16; master weights, AdamW moments and
gradients in float32.

An AdamW update is often smaller than the spacing of bfloat16 numbers, so bfloat16 weights alone would not change. The
optimizer updates the master weights, and the model's weights are the master weights, rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.train.optimizer import OPTIONS, Optimizer, Parts, adamw, weight_decay_groups

PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of weights and activations."""


def make_optimizer(
    parts: Parts, precision: str, *, learning_rate: float, weight_decay: float, sharded: bool = False
) -> Optimizer:
    """Make AdamW for all `parts` of a float32 model, and convert the model to `precision`. sharded: as in `adamw`.

    Call it with the model on its final device, before anything depends on the parameters' dtypes.
    """
    if precision == "float32":
        return adamw(parts, learning_rate=learning_rate, weight_decay=weight_decay, sharded=sharded)
    return MasterAdamW(
        parts, PRECISIONS[precision], learning_rate=learning_rate, weight_decay=weight_decay, sharded=sharded
    )


class MasterAdamW:
    """AdamW on float32 master weights; converts the model's parameters to `dtype`.

    parts: (parameters, data-parallel group). Gradients are accumulated, averaged and clipped in float32. sharded
    (ZeRO-1): master weight and moments of a parameter are on one rank of its data-parallel group, which updates the
    parameter and broadcasts it in `dtype`; else on all ranks. Has the optimizer API of a training loop: param_groups,
    step, zero_grad.
    """

    def __init__(
        self, parts: Parts, dtype: torch.dtype, *, learning_rate: float, weight_decay: float, sharded: bool
    ) -> None:
        self._parameters: list[nn.Parameter] = []
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        # By group name, for groups of several ranks: the parameters that each rank updates.
        self._owned: dict[str, list[list[nn.Parameter]]] = {}
        by_group: dict[str, tuple[ProcessGroup | None, list[nn.Parameter]]] = {}
        for parameters, group in parts:
            shared = group if sharded and group_size(group) > 1 else None
            by_group.setdefault(group_name(shared), (shared, []))[1].extend(parameters)
        for name, (group, parameters) in by_group.items():
            parameters = list(dict.fromkeys(parameters))
            self._parameters += parameters
            mine = parameters
            if group is not None:
                self._owned[name] = _distribute(parameters, group_size(group))
                mine = self._owned[name][group_rank(group)]
            self._masters |= {one: nn.Parameter(one.detach().float().clone()) for one in mine}
        for parameter in self._parameters:
            parameter.data = parameter.data.to(dtype)
            parameter.grad_dtype = torch.float32
        groups = weight_decay_groups(list(self._masters.values()), weight_decay)
        # With fewer parameters than ranks, a rank may have nothing to update.
        self._inner = torch.optim.AdamW(groups, lr=learning_rate, **OPTIONS) if groups else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the master weights; a new learning rate takes effect in the next step."""
        return [] if self._inner is None else self._inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Update the master weights from the gradients, and round them into the parameters on all ranks."""
        for parameter, master in self._masters.items():
            master.grad = parameter.grad
        if self._inner is not None:
            self._inner.step()
        for master in self._masters.values():
            master.grad = None
        self.copy_masters_to_model()
        for name, owned in self._owned.items():
            _broadcast(owned, group_of(name))

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """AdamW state of a parameter; None where another rank has it."""
        if self._inner is None or parameter not in self._masters:
            return None
        state: dict[str, Any] = self._inner.state[self._masters[parameter]]
        return state

    def master_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Master weight of a parameter; None where another rank has it."""
        return self._masters.get(parameter)

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Round this rank's master weights into its parameters."""
        if self._masters:
            torch._foreach_copy_([*self._masters], [master.detach() for master in self._masters.values()])


def _distribute(parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Distribute parameters over ranks by size: largest first, each to the rank with the fewest elements."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: -one.numel()):
        rank = held.index(min(held))
        shares[rank].append(parameter)
        held[rank] += parameter.numel()
    return shares


def _broadcast(owned: list[list[nn.Parameter]], group: ProcessGroup | None) -> None:
    """Broadcast every rank's parameters to the group, one flat tensor per rank."""
    for rank, parameters in enumerate(owned):
        if not parameters:
            continue
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        dist.broadcast(flat, group=group, group_src=rank)
        parts = flat.split([parameter.numel() for parameter in parameters])
        torch._foreach_copy_(
            [parameter.detach() for parameter in parameters],
            [part.view_as(one) for part, one in zip(parts, parameters, strict=True)],
        )
