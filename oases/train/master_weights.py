"""Training in bfloat16: weights and activations of the model in it, masters, moments and gradients in float32.

A step of AdamW is often less than the distance between two numbers of bfloat16, so a weight that is kept in it alone
stands still. The masters take the step, and the model's weights are the masters, rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.train.optimizer import OPTIONS, Optimizer, Parts, adamw, weight_decay_groups

PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of weights and activations."""


def make_optimizer(
    parts: Parts, precision: str, *, learning_rate: float, weight_decay: float, sharded: bool = False
) -> Optimizer:
    """AdamW over all `parts` of a model in float32, which is then in `precision`; sharded: as in `adamw`.

    To be called where the model stays, before anything hangs on its parameters' types.
    """
    if precision == "float32":
        return adamw(parts, learning_rate=learning_rate, weight_decay=weight_decay, sharded=sharded)
    return MasterAdamW(
        parts, PRECISIONS[precision], learning_rate=learning_rate, weight_decay=weight_decay, sharded=sharded
    )


class MasterAdamW:
    """AdamW on float32 masters of a model's parameters, which become of type `dtype` here.

    parts: (parameters, data-parallel group). Gradients are accumulated in float32 over micro-batches and sub-batches,
    averaged and clipped in it. sharded: masters and moments of a parameter lie on one rank of its data-parallel
    group, which updates it and sends it to the others in `dtype`; else on all.
    It has what a loop asks of an optimizer: param_groups, step, zero_grad.
    """

    def __init__(
        self, parts: Parts, dtype: torch.dtype, *, learning_rate: float, weight_decay: float, sharded: bool
    ) -> None:
        self._parameters: list[nn.Parameter] = []
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        # Of each group with several ranks, by its name: what each rank updates.
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
                self._owned[name] = _dealt(parameters, group_size(group))
                mine = self._owned[name][group_rank(group)]
            self._masters |= {one: nn.Parameter(one.detach().float().clone()) for one in mine}
        for parameter in self._parameters:
            parameter.data = parameter.data.to(dtype)
            parameter.grad_dtype = torch.float32
        groups = weight_decay_groups(list(self._masters.values()), weight_decay)
        # A rank may have nothing to update, where there are fewer parameters than ranks.
        self._inner = torch.optim.AdamW(groups, lr=learning_rate, **OPTIONS) if groups else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the masters; a learning rate written there holds from the next step on."""
        return [] if self._inner is None else self._inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters by the parameters' gradients, and the parameters by the masters, on all ranks."""
        for parameter, master in self._masters.items():
            master.grad = parameter.grad
        if self._inner is not None:
            self._inner.step()
        for master in self._masters.values():
            master.grad = None
        self.copy_masters_to_model()
        for name, owned in self._owned.items():
            _sent(owned, group_of(name))

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """The moments of a parameter, None where another rank has them."""
        if self._inner is None or parameter not in self._masters:
            return None
        state: dict[str, Any] = self._inner.state[self._masters[parameter]]
        return state

    def master_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The master of a parameter, None where another rank has it."""
        return self._masters.get(parameter)

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Round the masters of this rank into its parameters, after they were changed."""
        if self._masters:
            torch._foreach_copy_([*self._masters], [master.detach() for master in self._masters.values()])


def _dealt(parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """The parameters of each rank, about as many elements for each: the largest first, to who has the least."""
    dealt: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: -one.numel()):
        rank = held.index(min(held))
        dealt[rank].append(parameter)
        held[rank] += parameter.numel()
    return dealt


def _sent(owned: list[list[nn.Parameter]], group: ProcessGroup | None) -> None:
    """Send every rank's parameters to the others of the group."""
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
