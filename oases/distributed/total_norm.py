"""Total norm of gradients of which some are of tensor-parallel shards, for torch's own gradient clipping.

`torch.nn.utils.clip_grad_norm_` and `get_total_norm` see gradients as tensors. Here each is looked up among the
gradients of registered shards: the norm of a group's shards is taken over the group, as if its ranks' gradients were
concatenated; all other gradients count once. So every rank clips by the norm of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from oases.core.execution.group import group_of

_norm_of = clip_grad._get_total_norm
_totals: WeakSet[Tensor] = WeakSet()
"""Norms over all ranks, by which shards may be clipped."""

Groups = Callable[[], Mapping[int, str]]
"""Function that returns the name of the group of each shard's gradient, by the gradient's id."""


def install(groups: Groups, require: Callable[[Iterable[Tensor]], None]) -> None:
    """Replace torch's total norm by one that knows shards, once per process.

    require: raises UsageError for gradients whose total norm cannot be known.
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
        """Norm of an order over all gradients, as torch's. Collective over the groups of shards among them."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        require(given)
        known = groups()
        by_group: dict[str, list[Tensor]] = {}
        for tensor in given:
            by_group.setdefault(known.get(id(tensor), ""), []).append(tensor)
        if not set(by_group) - {""}:
            return _norm_of(given, norm_type, error_if_nonfinite, foreach)
        order = float(norm_type)
        parts = [_over(name, _full(_norm_of(each, order, False, foreach)), order) for name, each in by_group.items()]
        total = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]), order)
        if error_if_nonfinite:
            _norm_of([total], order, True)
        _totals.add(total)
        return total

    clip_grad._get_total_norm = get_total_norm
    torch.nn.utils.get_total_norm = get_total_norm


def is_total(norm: Tensor) -> bool:
    """Whether a norm is over all ranks: one that the replaced function returned, or made of such a one."""
    return any(norm is each for each in _totals)


def _over(name: str, norm: Tensor, order: float) -> Tensor:
    """Norm over the ranks of a group from each rank's; "" for what every rank has."""
    if not name:
        return norm
    wide = norm.to(torch.promote_types(norm.dtype, torch.float32))
    if order == float("inf"):
        dist.all_reduce(wide, dist.ReduceOp.MAX, group_of(name))
        return wide
    power = wide**order
    dist.all_reduce(power, group=group_of(name))
    return power ** (1 / order)


def _full(norm: Any) -> Tensor:
    """Norm of the gradients of FSDP2, which is sharded itself, as a plain tensor."""
    found: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return found
