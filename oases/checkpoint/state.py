"""Tensors of a model and its optimizer by name, each laid out as the part of the full tensor that this rank has.

A name does not depend on parallel degrees, so a checkpoint can be loaded with others. Weights are named "model.NAME",
the master weight in the place of a rounded one, and state of the optimizer "optimizer.NAME.KIND". State of a
parameter's shape is laid out as the parameter; scalars, such as a number of steps, are stored whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.blocks.randomness import default_generators
from oases.core.execution.dtensors import local_of
from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.distributed.fsdp import rows_of
from oases.distributed.optimizer import ShardedOptimizer, set_state, state_of, weight_of
from oases.distributed.pieces import StateShard, pieces_of
from oases.distributed.shard_map import TensorShard, shard_map
from oases.errors import UsageError

State = dict[str, Any]
"""This rank's part of a checkpoint: tensors and StateShards by name."""
Stored = tuple[tuple[int, ...], torch.dtype]
"""Full shape and type of a tensor in a checkpoint."""
Optimizer = torch.optim.Optimizer

WEIGHTS, MOMENTS = "model.", "optimizer."
"""Prefixes of names in a checkpoint."""
_TYPES: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}


def state(
    model: nn.Module, optimizer: Optimizer | None, group: ProcessGroup | None, names: Mapping[str, str] | None = None
) -> State:
    """Collect this rank's tensors; with an optimizer, random states too.

    group: shards where a module names none. names: those in the checkpoint where they differ. UsageError for state of
    the optimizer that is neither of its parameter's shape nor scalar.
    """
    found = dict(_tensors(model, optimizer, group, names or {}, weights_of_others=False))
    if optimizer is not None:
        rank = group_rank(group)
        found |= {random_name(name, rank): each.get_state() for name, each in generators(model).items()}
    return found


def _tensors(
    model: nn.Module,
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
    names: Mapping[str, str],
    *,
    weights_of_others: bool,
) -> Iterator[tuple[str, Any]]:
    """Weights, or their masters, and the optimizer's state that this rank has, by name.

    weights_of_others: also the model's own weights where another rank has the master. Both round alike.
    """
    for shard in held_tensors(model, group):
        name, parameter = names.get(shard.name, shard.name), shard.tensor
        weight = weight_of(optimizer, parameter) if isinstance(parameter, nn.Parameter) else parameter
        if weight is not None or weights_of_others:
            yield WEIGHTS + name, _as_stored(parameter if weight is None else weight, shard)
        if weight is None or optimizer is None or not isinstance(parameter, nn.Parameter):
            continue
        for kind, value in (state_of(optimizer, parameter) or {}).items():
            if value is not None:
                yield f"{MOMENTS}{name}.{kind}", _as_stored(_savable(value, kind, shard, optimizer), shard)


def held_tensors(model: nn.Module, group: ProcessGroup | None) -> list[TensorShard]:
    """Parameters and persistent buffers that this rank has. Those on `meta` are of another pipeline stage."""
    return [shard for shard in shard_map(model, group) if not shard.tensor.is_meta]


def _as_stored(tensor: Tensor, shard: TensorShard) -> Tensor:
    """This rank's part of a parameter, or of state of its shape, as a tensor of the full shape; a scalar as it is."""
    held, rows = local_of(tensor).detach(), rows_of(shard.tensor, shard.part_rows)
    if tensor.shape != shard.tensor.shape or (shard.cut is None and rows is None):
        return held
    group = shard.process_group
    pieces = pieces_of(shard.shape, shard.cut, group_rank(group), group_size(group), rows)
    # Empty ones have the offsets of another rank's, of which one would be dropped as a copy.
    return StateShard(held, shard.shape, tuple(piece for piece in pieces if 0 not in piece.sizes))


def _savable(value: Any, kind: Any, shard: TensorShard, optimizer: Optimizer) -> Tensor:
    tensor = torch.tensor(value) if isinstance(value, bool | int | float) else value
    fits = isinstance(tensor, Tensor) and (tensor.numel() == 1 or tensor.shape == shard.tensor.shape)
    if not fits or not isinstance(kind, str) or "." in kind:
        what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UsageError(
            f"{type(optimizer).__name__} keeps {kind!r} {what} for {shard.name!r} of shape "
            f"{tuple(shard.tensor.shape)}; a checkpoint takes tensors of the parameter's shape and numbers: use "
            "another optimizer, such as AdamW or SGD"
        )
    return tensor


# --- loading ---


def state_to_load(
    model: nn.Module,
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
    names: Mapping[str, str],
    stored: Mapping[str, Stored],
) -> State:
    """Collect this rank's tensors to be filled from a checkpoint; the optimizer gets the state that it stores.

    names: in the checkpoint, of the model's tensors. stored: of each tensor in the checkpoint.
    """
    kinds: dict[str, list[str]] = {}
    for name in stored:
        if name.startswith(MOMENTS):
            of, _, kind = name.removeprefix(MOMENTS).rpartition(".")
            kinds.setdefault(of, []).append(kind)
    groups = [] if optimizer is None else optimizer.param_groups
    options = {id(parameter): each for each in groups for parameter in each["params"]}
    for shard in held_tensors(model, group):
        name, parameter = names.get(shard.name, shard.name), shard.tensor
        if optimizer is None or not isinstance(parameter, nn.Parameter) or id(parameter) not in options:
            continue
        weight = weight_of(optimizer, parameter)
        if weight is not None:
            here = state_of(optimizer, parameter) or {}
            rounded = stored[WEIGHTS + name][1] != weight.dtype
            made = {}
            for kind in kinds.get(name, ()):
                shape, dtype = stored[f"{MOMENTS}{name}.{kind}"]
                if shape != shard.shape or (kind == "step" and not shape):
                    there = options[id(parameter)].get("fused") or options[id(parameter)].get("capturable")
                    made[kind] = torch.empty(shape, dtype=dtype, device=weight.device if there else "cpu")
                    continue
                # Of the weight's type where that is converted, as torch does.
                dtype = weight.dtype if rounded and dtype.is_floating_point else dtype
                before = here.get(kind)
                if isinstance(before, Tensor) and before.shape == weight.shape and before.dtype == dtype:
                    made[kind] = before.detach()
                else:
                    made[kind] = torch.empty_like(weight.detach(), dtype=dtype)
            set_state(optimizer, parameter, made)
    return dict(_tensors(model, optimizer, group, names, weights_of_others=True))


def finish_loading(
    model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None, numbers: Mapping[str, str]
) -> None:
    """Make numbers of the optimizer's state, and round masters to the model's weights, once tensors are filled.

    numbers: kinds of state that are Python numbers, with their types.
    """
    for shard in held_tensors(model, group):
        parameter = shard.tensor
        if isinstance(parameter, nn.Parameter) and (held := state_of(optimizer, parameter)):
            values = {kind: _TYPES[numbers[kind]](each.item()) for kind, each in held.items() if kind in numbers}
            set_state(optimizer, parameter, {**held, **values})
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.copy_masters_to_model()


# --- random states ---


def random_streams(model: nn.Module) -> list[str]:
    """Names of the per-rank random states in a checkpoint of this model."""
    return list(generators(model))


def generators(model: nn.Module) -> dict[str, torch.Generator]:
    """Default torch generators of the CPU and the model's GPU; Python's and numpy's are not used."""
    devices = {parameter.device for parameter in model.parameters()} | {torch.device("cpu")}
    return {device.type: default_generators(device)[-1] for device in devices}


def random_name(name: str, rank: int) -> str:
    """Name of a generator's state on a rank in a checkpoint."""
    return f"random.{rank}.{name}"
