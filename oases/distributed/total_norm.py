"""Norm of gradients of which some are on other ranks, for torch's own `clip_grad_norm_` and `get_total_norm`.

torch takes plain shards for whole gradients, refuses them beside DTensors, and knows of no other stage of a pipeline.
Here the norm of a group's plain shards is taken over the group, as if its ranks' gradients were concatenated; that of
DTensors is torch's own; gradients of a model in stages are those of all its ranks. So every rank clips by the norm
of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from oases.core.execution.dtensors import is_dtensor
from oases.core.execution.group import group_of
from oases.distributed.gradient_clipping import norm_of_stage
from oases.errors import UsageError

_norm_of = clip_grad._get_total_norm
_totals: WeakSet[Tensor] = WeakSet()
"""Norms over all ranks, by which shards may be clipped."""

Groups = Callable[[], Mapping[int, str]]
"""Function that returns the name of the group of each plain shard's gradient, by the gradient's id."""


def install(groups: Groups, stages: Iterable[nn.Module]) -> None:
    """Replace torch's total norm by one that knows shards and stages, once per process.

    stages: models of which this rank has one stage, or shards of all weights.
    """
    if clip_grad._get_total_norm is not _norm_of:
        return

    @torch.no_grad()
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Norm of an order over all gradients, as torch's. Collective over the ranks that have parts of them."""
        given, order = [tensors] if isinstance(tensors, Tensor) else list(tensors), float(norm_type)
        staged = _of_stage(given, list(stages))
        if staged is not None:
            total = _norm_of_stage(staged, given, order)
        else:
            known, alike = groups(), dict[Any, list[Tensor]]()
            for tensor in given:
                key: Any = getattr(tensor, "device_mesh", None) or known.get(id(tensor), "")
                alike.setdefault(key, []).append(tensor)
            if not set(alike) - {""}:
                return _norm_of(given, norm_type, error_if_nonfinite, foreach)
            parts = [_over(key, _norm_of(each, order, False, foreach), order) for key, each in alike.items()]
            total = parts[0]
            if len(parts) > 1:
                total = torch.linalg.vector_norm(torch.stack([part.to(total.device) for part in parts]), order)
        if error_if_nonfinite:
            _norm_of([total], order, True)
        _totals.add(total)
        return total

    clip_grad._get_total_norm = get_total_norm
    torch.nn.utils.get_total_norm = get_total_norm


def is_total(norm: Tensor) -> bool:
    """Whether a norm is over all ranks: one that the replaced function returned."""
    return any(norm is each for each in _totals)


def _of_stage(given: list[Tensor], stages: list[nn.Module]) -> nn.Module | None:
    """Model in stages that gradients are of; without gradients, as of a stage of frozen layers, the only one."""
    if not given:
        return stages[0] if len(stages) == 1 else None
    ids = {id(each) for each in given}
    return next((model for model in stages if any(id(each.grad) in ids for each in model.parameters())), None)


def _norm_of_stage(model: nn.Module, given: list[Tensor], order: float) -> Tensor:
    ids = {id(each) for each in given}
    mine = [each for each in model.parameters() if id(each.grad) in ids]
    if order != 2.0 or len(mine) != len(ids):
        what = f"norm_type={order}" if order != 2.0 else f"{len(ids) - len(mine)} gradients that are not the model's"
        raise UsageError(
            f"the norm of gradients of {type(model).__name__}, of which this rank has one stage, or shards, was "
            f"asked for with {what}; give norm_type=2.0 and gradients of the model alone, as they are in .grad"
        )
    return norm_of_stage(model, mine)


def _over(key: Any, norm: Any, order: float) -> Tensor:
    """Norm over the ranks of a mesh or a group from each rank's; "" for what every rank has."""
    if is_dtensor(norm):
        full: Tensor = norm.full_tensor()
        return full
    wide: Tensor = norm.to(torch.promote_types(norm.dtype, torch.float32)) if key else norm
    if not key:
        return wide
    if order == float("inf"):
        dist.all_reduce(wide, dist.ReduceOp.MAX, group_of(key))
        return wide
    power = wide**order
    dist.all_reduce(power, group=group_of(key))
    return power ** (1 / order)
