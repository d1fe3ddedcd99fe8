"""Attributes of a parallelized model that tools read, and its replaced methods to save and load full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.after_import import after_import
from oases.autotp.checking import require_alike
from oases.autotp.gathering import GatherBuffers, base_of, gather_blocks, is_adapted, is_pretrained
from oases.autotp.pretrained import save_pretrained
from oases.autotp.tools.accelerate import patch_accelerate, patch_parallelism
from oases.autotp.tools.adapters import guard_adapters
from oases.autotp.tools.optimizer_state import shard_of
from oases.autotp.tools.recomputation import map_checkpointing
from oases.autotp.tools.trainer import patch_fused_head, patch_trainer
from oases.core.blocks.sharding import cuts, sharded_modules
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.distributed.failures import raise_together
from oases.distributed.mesh import mesh_of, run_of
from oases.distributed.replicas import replicas_of
from oases.distributed.shard_map import ModelTensor, tensors_of_model
from oases.distributed.state_shards import StateShard
from oases.errors import UsageError


def connect_tools(model: nn.Module, group: ProcessGroup | None, adapt: Callable[[nn.Module], None]) -> None:
    """Have Trainer, accelerate and peft see a parallelized model as a tensor-parallel one, and save it whole.

    group: tensor-parallel ranks. adapt: shards what peft adds to the model's layers, and runs them anew.
    """
    map_checkpointing(model)
    object.__setattr__(model, "compile", _refuse_compile)
    for each in ("lightning.fabric", "lightning_fabric"):
        after_import(f"{each}.strategies.model_parallel", _load_checkpoints)
    ranks = group_size(group)
    if ranks == 1:
        _cut_what_is_loaded(model)
        return
    base = base_of(model)
    replicas = replicas_of(model)
    if is_pretrained(base):
        from transformers.distributed.configuration_utils import DistributedConfig

        pretrained: Any = base
        pretrained._tp_size = ranks
        data = 1 if replicas is None else group_size(replicas.group)
        pretrained.config.distributed_config = DistributedConfig(tp_size=ranks, fsdp_size=data)
    else:
        model.tp_size = ranks  # type: ignore[assignment]
    _cut_what_is_loaded(model)
    object.__setattr__(model, "oases_adapt", partial(_adapt, adapt=adapt, group=group_name(group)))
    after_import("transformers.trainer", patch_trainer)
    after_import("trl.trainer.utils", patch_fused_head)
    after_import("peft.tuners.tuners_utils", guard_adapters)
    after_import("peft.peft_model", _save_adapters)
    after_import("accelerate.accelerator", patch_accelerate)
    after_import("accelerate.parallelism_config", patch_parallelism)


def _cut_what_is_loaded(model: nn.Module) -> None:
    for holder, _ in sharded_modules(model):
        holder.register_load_state_dict_pre_hook(_cut_full_tensors)


def refuse_tools() -> None:
    """Have Trainer and accelerate refuse models in stages, whose steps are those of their `train_step`."""
    after_import("transformers.trainer", patch_trainer)
    after_import("accelerate.accelerator", patch_accelerate)


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


def _adapt(model: nn.Module, new: nn.Module, adapt: Callable[[nn.Module], None], group: str) -> None:
    """Shard the adapters `new`, which peft added to the layers. UsageError unless all ranks have equal ones."""
    replicas = replicas_of(model)
    for each in (group_of(group), None if replicas is None else replicas.group):
        require_alike(new, each, values=True)
    before = {holder for holder, _ in sharded_modules(model)}
    adapt(model)
    for holder in {holder for holder, _ in sharded_modules(model)} - before:
        holder.register_load_state_dict_pre_hook(_cut_full_tensors)


def _save_adapters(module: Any) -> None:
    """Have `save_pretrained` of a PeftModel, in `peft.peft_model`, write full tensors of adapters added to shards."""
    model: Any = module.PeftModel
    save = model.save_pretrained
    if hasattr(save, "__wrapped__"):
        return

    @wraps(save)
    def saved(self: Any, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        adapt = getattr(self, "oases_adapt", None)
        if adapt is None:
            save(self, save_directory, *args, **kwargs)
        else:
            ModelSaver(self, group_of(adapt.keywords["group"]))(save_directory, *args, **kwargs)

    model.save_pretrained = saved


def _load_checkpoints(module: Any) -> None:
    """Have Lightning's ModelParallelStrategy save and load parallelized models, whose shards are no DTensors."""
    is_distributed = module._has_dtensor_modules
    if not hasattr(is_distributed, "__wrapped__"):

        @wraps(is_distributed)
        def found(model: object) -> bool:
            parts = model.modules() if isinstance(model, nn.Module) else ()
            return is_distributed(model) or any(getattr(each, "oases_partition", None) is not None for each in parts)

        module._has_dtensor_modules = found


def _cut_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of `load_state_dict`: replace full tensors of sharded parameters by this rank's shards."""
    for parameter, cut in cuts(module).items():
        name = next(name for name, each in module.named_parameters() if id(each) == parameter)
        given = state.get(prefix + name)
        if isinstance(given, StateShard):
            state[prefix + name] = given.local
        elif isinstance(given, Tensor):
            state[prefix + name] = shard_of(given, module.get_parameter(name), cut, module)


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
        found = [
            each
            for each in tensors_of_model(self._model, group)
            if any(name in trained or adapters & set(name.split(".")) for name in each.names)
        ]
        state = full_tensors(found, group)
        with raise_together(group):
            if group_rank(group) == 0:
                save: Any = type(self._model).save_pretrained  # type: ignore[attr-defined]
                getattr(save, "__wrapped__", save)(self._model, str(folder), state_dict=state, **options)


def full_tensors(tensors: Iterable[ModelTensor], group: ProcessGroup | None) -> dict[str, Tensor]:
    """Full tensors by name, on the CPU of the group's first rank; {} on others. Collective."""
    found, wire, first = {}, GatherBuffers(), group_rank(group) == 0
    for each in tensors:
        whole = torch.empty(each.shape, dtype=each.dtype) if first else None
        for row, block in gather_blocks(each, group, wire):
            if whole is not None and block is not None:
                whole.reshape(each.shape or (1,))[row : row + len(block)] = block
        if whole is not None:
            found.update(dict.fromkeys(each.names, whole))
    return found
