"""State of an optimizer over sharded parameters as tools store it: full tensors, as of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from oases.core.blocks.sharding import Cut, cuts, holders
from oases.core.execution.dtensors import is_dtensor, local_of
from oases.core.execution.group import ProcessGroup, group_of, group_rank, group_size, resolve
from oases.distributed.collectives import all_gather_cut
from oases.distributed.dtensors import is_tensor_parallel, with_local
from oases.distributed.fsdp import rows_of
from oases.distributed.optimizer import ShardedOptimizer
from oases.errors import UsageError

_ACCEPTS = "_oases_accepts_full_state"
_MASTERS = "master_weights"
"""Entry of a `ShardedOptimizer`'s state with its master weights, by number."""


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch in accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def full_optimizer_state(
    optimizer: Any, models: Iterable[nn.Module], process_group: ProcessGroup | None = None
) -> dict[str, Any]:
    """State dict of an optimizer with full tensors, on the first rank of all that train. Collective.

    models: those whose parameters it updates. process_group: all ranks; None: the default group. Tensors of a sharded
    parameter's shape are gathered, one by one, and master weights; all other state stays this rank's. Other ranks get
    their own state. UsageError for state of which replicas have parts (zero).
    """
    torch_optimizer, first = inner_optimizer(optimizer), group_rank(resolve(process_group)) == 0
    _require_whole(torch_optimizer)
    state = torch_optimizer.state_dict()
    masters = state.get(_MASTERS, {})
    for number, (parameter, cut, holder) in _numbered(torch_optimizer, models).items():
        held = dict(state["state"].get(number, {}))
        if cut is None:
            continue
        for kept, names in ((held, sorted(held)), (masters, [number] if number in masters else [])):
            for name in names:
                if isinstance(kept[name], Tensor) and kept[name].shape == parameter.shape:
                    group = group_of(getattr(holder, "_group_name", ""))
                    whole = all_gather_cut(local_of(kept[name]), cut, group, "state of an optimizer")
                    kept[name] = whole.cpu() if first else kept[name]
        if held:
            state["state"][number] = held
    held_by_all: dict[str, Any] = tree_map_only(Tensor, local_of, state)
    return held_by_all


def _require_whole(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer of which this rank has a part of the state."""
    if isinstance(optimizer, ShardedOptimizer) and optimizer.shares_state:
        raise UsageError(
            "the optimizer's state is sharded over replicas (zero), of which a tool saves and loads that of one rank "
            "alone; leave zero out, or save by oases.save_checkpoint in a custom training loop"
        )


def accept_full_state(optimizer: Any, models: Iterable[nn.Module]) -> None:
    """Have `load_state_dict` of an optimizer take full tensors, too, of which it keeps this rank's shards."""
    torch_optimizer, models = inner_optimizer(optimizer), list(models)
    _require_whole(torch_optimizer)
    if getattr(torch_optimizer, _ACCEPTS, False):
        return
    setattr(torch_optimizer, _ACCEPTS, True)

    def cut_state(this: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        state = dict(given["state"])
        numbered = _numbered(this, models)
        for number, (parameter, cut, holder) in numbered.items():
            state[number] = {
                name: shard_of(each, parameter, cut, holder) if isinstance(each, Tensor) else each
                for name, each in state.get(number, {}).items()
            }
        masters = {
            number: shard_of(each, *numbered[number]) if number in numbered else each
            for number, each in given.get(_MASTERS, {}).items()
        }
        kept = {_MASTERS: masters} if masters else {}
        return {**given, "state": {number: each for number, each in state.items() if each}, **kept}

    torch_optimizer.register_load_state_dict_pre_hook(cut_state)


def shard_of(given: Tensor, parameter: Tensor, cut: Cut | None, holder: nn.Module | None) -> Tensor:
    """This rank's part of a full tensor, placed as the parameter; DTensors and tensors of other shapes themselves."""
    whole, placed = list(parameter.shape), is_dtensor(parameter)
    if cut is not None:
        whole[cut.dim] = cut.size
    if is_dtensor(given) or list(given.shape) != whole or not given.dim():
        return given
    if not placed and (cut is None or given.shape == parameter.shape):
        return given
    part = given
    if cut is not None:
        group = group_of(getattr(holder, "_group_name", ""))
        part = cut.take(given, group_rank(group), group_size(group))
        part = part.clone(memory_format=torch.contiguous_format)  # fused optimizers read memory in order
    rows = rows_of(parameter, len(part))
    part = part if rows is None else part[slice(*rows)]
    return with_local(parameter, part) if placed else part


def _numbered(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
) -> dict[int, tuple[nn.Parameter, Cut | None, nn.Module | None]]:
    """Parameters that are sharded, or DTensors, by their numbers in the optimizer's `state_dict()`.

    Each with its cut and holder, if any.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found: dict[int, tuple[nn.Parameter, Cut | None, nn.Module | None]] = {}
    for model in models:
        cut_by, held_by = cuts(model), holders(model)
        for number, parameter in enumerate(parameters):
            if id(parameter) in cut_by or (number not in found and is_tensor_parallel(parameter)):
                found[number] = (parameter, cut_by.get(id(parameter)), held_by.get(id(parameter)))
    return found
