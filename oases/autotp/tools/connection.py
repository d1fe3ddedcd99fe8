"""Attributes of a parallelized model that tools read, and its replaced methods to save and load full tensors."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.gathering import base_of, gather_state, is_adapted, is_pretrained
from oases.autotp.pretrained import save_pretrained
from oases.autotp.tools.accelerate import patch_accelerate, patch_parallelism
from oases.autotp.tools.optimizer_state import shard_of
from oases.autotp.tools.recomputation import map_checkpointing
from oases.autotp.tools.trainer import patch_trainer
from oases.core.blocks.sharding import cuts
from oases.core.execution.dtensors import is_dtensor
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.distributed.failures import raise_together
from oases.distributed.guards import require_own_state
from oases.distributed.mesh import mesh_of, run_of
from oases.distributed.replicas import replicas_of
from oases.errors import UsageError


def connect_tools(model: nn.Module, group: ProcessGroup | None) -> None:
    """Have Trainer and accelerate see a parallelized model as a tensor-parallel one, and save it whole.

    group: tensor-parallel ranks.
    """
    map_checkpointing(model)
    object.__setattr__(model, "compile", _refuse_compile)
    take_full_tensors(model)
    ranks = group_size(group)
    if ranks == 1:
        return
    base = base_of(model)
    replicas = replicas_of(model)
    if is_pretrained(base):
        from transformers.distributed.configuration_utils import DistributedConfig

        pretrained: Any = base
        pretrained._tp_size = ranks
        object.__setattr__(base, "resize_token_embeddings", _refuse_resize)
        data = 1 if replicas is None else group_size(replicas.group)
        pretrained.config.distributed_config = DistributedConfig(tp_size=ranks, fsdp_size=data)
    else:
        model.tp_size = ranks  # type: ignore[assignment]
    replace_functions(model)


def replace_functions(model: nn.Module) -> None:
    """Replace the functions of Trainer and accelerate that take one rank's shards, or a stage, for the model."""
    if is_pretrained(base_of(model)):
        patch_trainer(importlib.import_module("transformers.trainer"))
    if find_spec("accelerate") is not None:
        patch_accelerate(importlib.import_module("accelerate.accelerator"))
        patch_parallelism(importlib.import_module("accelerate.parallelism_config"))


def named_mesh(mesh: object, model: nn.Module, group: ProcessGroup | None) -> DeviceMesh | None:
    """Mesh of a model without stages: the given one if it has names, else "tp" alone; None for a single process."""
    if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names:
        return mesh
    kind = next(model.parameters()).device.type.replace("meta", "cpu")
    return None if group is None else DeviceMesh.from_group(group, kind, mesh_dim_names=("tp",))


def _refuse_compile(*_: Any, **__: Any) -> None:
    """Replacement of `nn.Module.compile` for parallelized models."""
    raise UsageError(
        "compile() of a parallelized model: its layers run as traced graphs in an order of their own; leave it out, "
        "or compile their blocks by parallelize(..., compile='inductor')"
    )


def _refuse_resize(*_: Any, **__: Any) -> None:
    """Replacement of `resize_token_embeddings` for parallelized models."""
    raise UsageError(
        "resize_token_embeddings() of a parallelized model, of which each rank has a part of the vocabulary; resize "
        "before oases.parallelize(model)"
    )


def take_full_tensors(model: nn.Module) -> None:
    """Have `load_state_dict` take full tensors, too, of which each rank keeps what it has of the parameter."""
    model.register_load_state_dict_pre_hook(_require_own_state)
    for module in model.modules():
        if any(held is not None for held in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_place_full_tensors)


def _require_own_state(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    named = model.named_parameters(prefix=prefix.rstrip("."))
    require_own_state((name, state.get(name), parameter) for name, parameter in named)


def _place_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    found = cuts(module)
    for name, parameter in module._parameters.items():
        given = state.get(prefix + name)
        if parameter is not None and isinstance(given, Tensor) and not is_dtensor(given):
            state[prefix + name] = shard_of(given, parameter, found.get(id(parameter)), module)


class ModelSaver:
    """Replacement of a model's own `save_pretrained`, which would write this rank's shards alone.

    All ranks call it. The first rank of the first replica writes: the full model, or a PeftModel's adapter as peft
    writes it.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup | None) -> None:
        self._model = model
        self._group = group_name(group)

    def __call__(
        self,
        save_directory: str | Path,
        *,
        state_dict: Any = None,
        is_main_process: bool = True,
        safe_serialization: bool = True,
        max_shard_bytes: int = 5_000_000_000,
        **options: Any,
    ) -> None:
        """Write the model. state_dict, is_main_process: given by tools, not needed here.

        UsageError for other options of transformers, and for files that are not safetensors.
        """
        adapted = is_adapted(self._model)
        if not safe_serialization or (options and not adapted):
            asked = ", ".join(options) or "safe_serialization=False"
            raise UsageError(f"a parallelized model is saved by oases.save_pretrained(), which does not take {asked}")
        replicated = mesh_of(self._model) is not None or replicas_of(self._model) is not None
        group = None if replicated else group_of(self._group)
        if adapted:
            self._save_adapter(save_directory, run_of(self._model, group), options)
        else:
            sizes = {"max_shard_bytes": max_shard_bytes}
            save_pretrained(self._model, save_directory, process_group=group, keep_others=True, **sizes)

    def _save_adapter(self, folder: str | Path, group: ProcessGroup | None, options: dict[str, Any]) -> None:
        adapters = set(self._model.peft_config)  # type: ignore[arg-type]
        trained = {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        found = gather_state(
            self._model,
            process_group=group,
            wanted=lambda name: name in trained or bool(adapters & {*name.split(".")}),
        )
        state = {name: whole for name, whole in found if whole is not None}
        with raise_together(group):
            if group_rank(group) == 0:
                save: Any = type(self._model).save_pretrained  # type: ignore[attr-defined]
                save(self._model, str(folder), state_dict=state, **options)
