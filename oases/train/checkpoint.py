"""Checkpoints by torch.distributed.checkpoint: each rank writes its shards, any degree reads them back.

Shards are wrapped as DTensors for the time of saving and loading, which is what lets a checkpoint of one
tensor-parallel degree be read by another. A checkpoint is written aside and takes its place by a rename once it is
whole. Only folders that are checkpoints themselves are ever replaced.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from oases.errors import UsageError
from oases.parallel.group import HoldsGroup, ProcessGroup, group_name, group_rank, group_size
from oases.parallel.sharding import holders, sharded_parameters
from oases.train.data import VOCABULARY
from oases.train.optimizer import Optimizer, state_of

SIZES = "model.json"
"""The model's sizes, in the checkpoint's folder: what weights alone do not tell, the heads, among them."""


def require_checkpoint(path: str | Path) -> Path:
    """Raise UsageError unless `path` is a folder that `save` wrote."""
    path = Path(path)
    if not ((path / ".metadata").is_file() and (path / SIZES).is_file()):
        raise UsageError(f"{str(path)!r} is no checkpoint folder; give one that --checkpoint wrote")
    return path


def require_replaceable(path: str | Path) -> Path:
    """Raise UsageError unless `path` may be written: absent, an empty folder, or an earlier checkpoint."""
    given, path = path, Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise UsageError(f"checkpoint {str(given)!r} is a file; give the path of a folder of its own")
    if path.is_dir() and any(path.iterdir()) and not (path / SIZES).is_file():
        raise UsageError(
            f"checkpoint {str(given)!r} holds other files, which would be replaced; give a new or empty folder"
        )
    return path


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    sizes: dict[str, Any],
    group: ProcessGroup | None,
) -> None:
    """Write model, optimizer and step to the folder `path`, replacing an earlier checkpoint. All ranks call it.

    sizes: what a model must be built with to load it, as plain values. group: all ranks that train the model; what
    several of them hold is written once. Raises UsageError for a path that holds anything else.
    """
    path = require_replaceable(path)
    aside, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    _barrier(group)  # nobody writes before everybody has looked
    first = group_rank(group) == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / SIZES).write_text(json.dumps(sizes, indent=1))
    _barrier(group)
    state = _state(model, optimizer, group) | {"step": torch.tensor(step)}
    with _quiet():
        dcp.save(state, checkpoint_id=aside, process_group=group, no_dist=group is None)
    _barrier(group)
    if first:
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        aside.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    _barrier(group)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    sizes: dict[str, Any],
    group: ProcessGroup | None,
) -> int:
    """Read a checkpoint into model and optimizer (None: the model alone), in place; return its step.

    Raises UsageError where the folder is no checkpoint or holds a model of other sizes.
    """
    path = require_checkpoint(path)
    require_sizes(path, sizes)
    state = _state(model, optimizer, group) | {"step": torch.tensor(0)}
    with _quiet():
        dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
    if optimizer is not None:
        for parameter in model.parameters():
            moments = state_of(optimizer, parameter)
            if moments is not None:
                moments["step"].fill_(float(state["step"]))
    return int(state["step"])


def require_sizes(path: str | Path, sizes: dict[str, Any]) -> None:
    """Raise UsageError, naming what differs, unless the checkpoint is of a model of these sizes."""
    saved = {"vocabulary": VOCABULARY} | json.loads((Path(path) / SIZES).read_text())
    for name, size in sizes.items():
        if saved.get(name) != size:
            raise UsageError(
                f"checkpoint {str(path)!r} does not fit: {name} is {saved.get(name)} there and {size} here; give "
                "the sizes of the model that was saved"
            )


def _state(model: nn.Module, optimizer: Optimizer | None, group: ProcessGroup | None) -> dict[str, Any]:
    """What this rank holds. A shard belongs to the group of its layer: replicas of it hold the same one."""
    dims = {id(parameter): dim for _, parameter, dim in sharded_parameters(model)}
    cut_by = holders(model)
    meshes: dict[str, DeviceMesh] = {}

    def whole(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        tensor = tensor.detach()
        holder = cut_by.get(id(parameter))
        cutting = holder.process_group if isinstance(holder, HoldsGroup) else group
        if holder is None or cutting is None or group_size(cutting) == 1:
            return tensor
        name = group_name(cutting)
        if name not in meshes:
            meshes[name] = DeviceMesh.from_group(cutting, parameter.device.type)
        return DTensor.from_local(tensor, meshes[name], [Shard(dims[id(parameter)])])

    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = whole(parameter, parameter)
        moments = None if optimizer is None else state_of(optimizer, parameter)
        if moments is None:  # a sharded optimizer keeps those of this parameter on another rank, which writes them
            continue
        if not moments:  # before the first step AdamW has none; zeros are what it would begin with
            moments["step"] = torch.tensor(0.0)
            moments["exp_avg"] = torch.zeros_like(parameter)
            moments["exp_avg_sq"] = torch.zeros_like(parameter)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{name}.{moment}"] = whole(moments[moment], parameter)
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    """One process is what it looks like; DCP need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _barrier(group: ProcessGroup | None) -> None:
    if group_size(group) > 1:
        dist.barrier(group=group)
