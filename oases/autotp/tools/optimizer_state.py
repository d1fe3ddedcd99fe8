"""State of an optimizer over sharded parameters as tools store it: full tensors, as of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from oases.autotp.gathering import GatherBuffers, gather_blocks
from oases.core.blocks.sharding import Cut, cuts, holders
from oases.core.execution.group import ProcessGroup, group_of, group_rank, group_size, resolve
from oases.distributed.optimizer import ShardedOptimizer
from oases.distributed.shard_map import ModelTensor, TensorShard
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
    parameter's shape are gathered to the CPU, and master weights; all other state stays this rank's. Other ranks get
    their own state. UsageError for state of which replicas have parts (zero).
    """
    torch_optimizer, group = inner_optimizer(optimizer), resolve(process_group)
    _require_whole(torch_optimizer)
    state, wire = torch_optimizer.state_dict(), GatherBuffers()
    masters = state.get(_MASTERS, {})
    for number, (parameter, cut, holder) in _numbered(torch_optimizer, models).items():
        held = dict(state["state"].get(number, {}))
        for name, tensor in sorted(held.items()):
            if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                held[name] = _gathered(tensor, cut, holder, group, wire)
        if held:
            state["state"][number] = held
        if number in masters:
            masters[number] = _gathered(masters[number], cut, holder, group, wire)
    return state


def _gathered(tensor: Tensor, cut: Cut, holder: nn.Module, group: ProcessGroup | None, wire: GatherBuffers) -> Tensor:
    """Full tensor of a shard, on the CPU of the group's first rank; the shard on others. Collective."""
    first, shape = group_rank(group) == 0, list(tensor.shape)
    shape[cut.dim] = cut.size
    shards = group_of(getattr(holder, "_group_name", ""))
    held = ModelTensor(
        ("state",), frozenset(), tuple(shape), tensor.dtype, 0,
        TensorShard(("state",), frozenset(), tensor, tuple(shape), cut, shards),
    )  # fmt: skip
    whole = torch.empty(shape, dtype=tensor.dtype) if first else tensor
    for row, block in gather_blocks(held, group, wire):
        if block is not None:
            whole[row : row + len(block)] = block
    return whole


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


def shard_of(given: Tensor, parameter: Tensor, cut: Cut, holder: nn.Module) -> Tensor:
    """This rank's shard of a full tensor; a tensor of another shape than the full one itself."""
    whole = list(parameter.shape)
    whole[cut.dim] = cut.size
    if list(given.shape) != whole or given.shape == parameter.shape:
        return given
    group = group_of(getattr(holder, "_group_name", ""))
    part = cut.take(given, group_rank(group), group_size(group))
    return part.clone(memory_format=torch.contiguous_format)  # fused optimizers read memory in order


def _numbered(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
) -> dict[int, tuple[nn.Parameter, Cut, nn.Module]]:
    """Sharded parameters by their numbers in the optimizer's `state_dict()`, each with its cut and holder."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found: dict[int, tuple[nn.Parameter, Cut, nn.Module]] = {}
    for model in models:
        cut_by, held_by = cuts(model), holders(model)
        for number, parameter in enumerate(parameters):
            if id(parameter) in cut_by:
                found[number] = (parameter, cut_by[id(parameter)], held_by[id(parameter)])
    return found
