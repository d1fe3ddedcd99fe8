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

from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.core.execution.piece import default_generators
from oases.distributed.fsdp import local, rows_of
from oases.distributed.optimizer import ShardedOptimizer, set_state, state_of, weight_of
from oases.distributed.shard_map import TensorShard, shard_map
from oases.distributed.state_shards import StateShard, pieces_of
from oases.errors import UsageError

State = dict[str, Any]
"""This rank's part of a checkpoint: tensors and StateShards by name."""
Stored = tuple[tuple[int, ...], torch.dtype]
"""Full shape and type of a tensor in a checkpoint."""
Optimizer = torch.optim.Optimizer

WEIGHTS, MOMENTS = "model.", "optimizer."
"""Prefixes of names in a checkpoint."""


def held_tensors(model: nn.Module, group: ProcessGroup | None) -> list[TensorShard]:
    """Parameters and persistent buffers that this rank has. group: shards where a module names none.

    Those on `meta` are of another pipeline stage.
    """
    return [shard for shard in shard_map(model, group) if not shard.tensor.is_meta]


def state(
    model: nn.Module,
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
    names: Mapping[str, str] | None = None,
    *,
    copied: bool = False,
) -> State:
    """Collect this rank's tensors; with an optimizer, random states too.

    names: those in the checkpoint where they differ. copied: as copies in CPU memory, so that later steps can proceed
    while they are written. UsageError for state of the optimizer that is neither of its parameter's shape nor scalar.
    """
    found: State = {}
    for name, tensor, shard in _tensors(model, optimizer, group, names or {}):
        held = local(tensor.detach())
        held = held.to("cpu", copy=True) if copied else held
        found[name] = as_stored(held, shard) if _is_part(tensor, shard) else held
    if optimizer is not None:
        rank = group_rank(group)
        found |= {random_name(name, rank): each.get_state() for name, each in generators(model).items()}
    return found


def as_stored(held: Tensor, shard: TensorShard) -> Tensor:
    """This rank's part of a parameter, or state of its shape, as a tensor of the full shape."""
    rows = rows_of(shard.tensor)
    if shard.cut is None and rows is None:
        return held
    group = shard.process_group
    return StateShard(
        held, shard.shape, pieces_of(shard.shape, shard.cut, group_rank(group), group_size(group), rows)
    )


def _tensors(
    model: nn.Module, optimizer: Optimizer | None, group: ProcessGroup | None, names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor, TensorShard]]:
    """Weights, or their masters, and the optimizer's state that this rank has, by name and with their place."""
    for shard in held_tensors(model, group):
        name, parameter = names.get(shard.name, shard.name), shard.tensor
        if not isinstance(parameter, nn.Parameter):
            yield WEIGHTS + name, parameter, shard
            continue
        weight = weight_of(optimizer, parameter)
        if weight is None:  # with ZeRO-1 another rank has it, and writes it
            continue
        yield WEIGHTS + name, weight, shard
        for kind, value in ({} if optimizer is None else state_of(optimizer, parameter) or {}).items():
            if value is not None:
                yield f"{MOMENTS}{name}.{kind}", _require_savable(value, kind, shard, optimizer), shard


def _require_savable(value: Any, kind: Any, shard: TensorShard, optimizer: Optimizer | None) -> Tensor:
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


def _is_part(tensor: Tensor, shard: TensorShard) -> bool:
    """Whether a tensor has the layout of its parameter; else it is a scalar."""
    return tensor.shape == shard.tensor.shape


class LoadedState:
    """Tensors to load into a model and its optimizer. wanted: by name, to be filled by torch.distributed.checkpoint.

    stored: full shape and dtype of each tensor of the checkpoint. names: in the checkpoint, of the model's. updates:
    number of steps of parameters whose checkpoint does not hold it. numbers: kinds of state that are Python numbers,
    with their types.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        group: ProcessGroup | None,
        stored: Mapping[str, Stored],
        names: Mapping[str, str],
        updates: float | None = None,
        numbers: Mapping[str, str] | None = None,
    ) -> None:
        self._model, self._optimizer, self._updates = model, optimizer, updates
        self._numbers = numbers or {}
        self._states: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
        self.wanted: State = {}
        kinds: dict[str, list[str]] = {}
        for name in stored:
            if name.startswith(MOMENTS):
                of, _, kind = name.removeprefix(MOMENTS).rpartition(".")
                kinds.setdefault(of, []).append(kind)
        groups = [] if optimizer is None else optimizer.param_groups
        self._options = {id(parameter): each for each in groups for parameter in each["params"]}
        for shard in held_tensors(model, group):
            name, parameter = names.get(shard.name, shard.name), shard.tensor
            weight = weight_of(optimizer, parameter) if isinstance(parameter, nn.Parameter) else parameter
            # Where another rank has the master weight, load the model's own weight; both round alike.
            target = (parameter if weight is None else weight).detach()
            self.wanted[WEIGHTS + name] = as_stored(local(target), shard)
            if weight is not None and id(parameter) in self._options:
                assert optimizer is not None
                assert isinstance(parameter, nn.Parameter)
                rounded = stored[WEIGHTS + name][1] != weight.dtype
                made = {
                    kind: self._target(kind, stored[f"{MOMENTS}{name}.{kind}"], shard, weight, rounded)
                    for kind in kinds.get(name, ())
                }
                self._states.append((parameter, made))
                for kind, value in made.items():
                    part = local(value)
                    part = as_stored(part, shard) if _is_part(value, shard) else part
                    self.wanted[f"{MOMENTS}{name}.{kind}"] = part

    def _target(self, kind: str, stored: Stored, shard: TensorShard, weight: Tensor, rounded: bool) -> Tensor:
        """Tensor for state of one kind: the optimizer's own if there is one like it, else a new one."""
        (shape, dtype), parameter = stored, shard.tensor
        assert self._optimizer is not None
        assert isinstance(parameter, nn.Parameter)
        before = (state_of(self._optimizer, parameter) or {}).get(kind)
        full = shape == shard.shape and not (kind == "step" and not shape)
        if not full:
            options = self._options[id(parameter)]
            here = options.get("fused") or options.get("capturable")
            return torch.empty(shape, dtype=dtype, device=weight.device if here else "cpu")
        # Of the weight's type where that is converted, as torch does.
        dtype = weight.dtype if rounded and dtype.is_floating_point else dtype
        if isinstance(before, Tensor) and before.shape == weight.shape and before.dtype == dtype:
            return before.detach()
        return torch.empty_like(weight.detach(), dtype=dtype)

    def finish(self) -> None:
        """Give the optimizer its state, and the model its rounded weights, once `wanted` is filled."""
        types: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}
        for parameter, made in self._states:
            assert self._optimizer is not None
            values: dict[str, Any] = {
                kind: types[self._numbers[kind]](value.item()) if kind in self._numbers else value
                for kind, value in made.items()
            }
            if made and "step" not in made and self._updates is not None:
                values["step"] = torch.tensor(float(self._updates), device=parameter.device)
            set_state(self._optimizer, parameter, values)
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.copy_masters_to_model()


def random_streams(model: nn.Module) -> list[str]:
    """Names of the per-rank random states in a checkpoint of this model."""
    return list(generators(model))


def generators(model: nn.Module) -> dict[str, torch.Generator]:
    """Default torch generators of the CPU and the model's GPU; Python's and numpy's are not used."""
    devices = {parameter.device for parameter in model.parameters()} | {torch.device("cpu")}
    return {device.type: default_generators(device)[-1] for device in devices}


def set_random_states(model: nn.Module, random: Mapping[str, Tensor]) -> None:
    """Set the generators that have a state in `random`; the others stay."""
    for name, generator in generators(model).items():
        if name in random:
            generator.set_state(random[name])


def random_name(name: str, rank: int) -> str:
    """Name of a generator's state on a rank in a checkpoint."""
    return f"random.{rank}.{name}"
