"""Checkpoints by torch.distributed.checkpoint: each rank writes its shards, any degree reads them back.

Shards are wrapped as DTensors for the time of saving and loading, which is what lets a checkpoint of one
tensor-parallel degree be read by another. A checkpoint is written aside and renamed once it is whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from oases.errors import UsageError
from oases.parallel.group import ProcessGroup, group_rank, group_size
from oases.parallel.stack import sharded_parameters


def save(
    path: str | Path, model: nn.Module, optimizer: torch.optim.AdamW, step: int, group: ProcessGroup | None
) -> None:
    """Write model, optimizer and step to the folder `path`, replacing what was there. All ranks call it."""
    path = Path(path)
    aside = path.with_name(path.name + ".part")
    first = group_rank(group) == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(parents=True, exist_ok=True)
    _barrier(group)
    state = _state(model, optimizer, group) | {"step": torch.tensor(step)}
    dcp.save(state, checkpoint_id=aside, process_group=group, no_dist=group is None)
    _barrier(group)
    if first:
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
    _barrier(group)


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.AdamW | None, group: ProcessGroup | None) -> int:
    """Read a checkpoint into model and optimizer (None: the model alone), in place; return its step.

    Raises UsageError where the folder is no checkpoint or holds a model of other sizes.
    """
    path = Path(path)
    if not (path / ".metadata").is_file():
        raise UsageError(f"{str(path)!r} is no checkpoint folder; give one that --checkpoint wrote")
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = _state(model, optimizer, group) | {"step": torch.tensor(0)}
    for name, tensor in state.items():
        sizes = getattr(saved.get(name), "size", None)
        if sizes is None or tuple(sizes) != tuple(tensor.shape):
            raise UsageError(
                f"checkpoint {str(path)!r} does not fit: {name} is {tuple(sizes) if sizes else 'missing'} there "
                f"and {tuple(tensor.shape)} here; give the sizes of the model that was saved"
            )
    dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
    if optimizer is not None:
        for parameter in model.parameters():
            optimizer.state[parameter]["step"].fill_(float(state["step"]))
    return int(state["step"])


def _state(model: nn.Module, optimizer: torch.optim.AdamW | None, group: ProcessGroup | None) -> dict[str, Any]:
    dims = {id(parameter): dim for _, parameter, dim in sharded_parameters(model)}
    mesh = None
    if group is not None and group_size(group) > 1:
        mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)

    def whole(tensor: Tensor, dim: int | None) -> Tensor:
        tensor = tensor.detach()
        return tensor if mesh is None or dim is None else DTensor.from_local(tensor, mesh, [Shard(dim)])

    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        dim = dims.get(id(parameter))
        state[f"model.{name}"] = whole(parameter, dim)
        if optimizer is not None:
            moments = optimizer.state[parameter]
            if not moments:  # before the first step AdamW has none; zeros are what it would begin with
                moments["step"] = torch.tensor(0.0)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"optimizer.{name}.{moment}"] = whole(moments[moment], dim)
    return state


def _barrier(group: ProcessGroup | None) -> None:
    if group_size(group) > 1:
        dist.barrier(group=group)
