"""The Accelerator of accelerate with parallelized models: what it saves, loads and gathers."""

from __future__ import annotations

from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oases.autotp.gathering import full_state_dict
from oases.autotp.tools.optimizer_state import accept_full_state, full_optimizer_state
from oases.autotp.weights import load_weights
from oases.distributed.mesh import mesh_of
from oases.errors import UsageError


def patch_accelerate(module: Any) -> None:
    """Replace `prepare_model` of `accelerate.accelerator`, once: accelerators of parallelized models get our methods.

    They have no point of extension that a model can reach. No issue was found.
    """
    accelerator: Any = module.Accelerator
    prepare_model = accelerator.prepare_model
    if hasattr(prepare_model, "__wrapped__"):
        return

    @wraps(prepare_model)
    def prepare(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        require_callable(model, "Accelerator.prepare")
        if _is_parallel(model) and "_oases_methods" not in vars(self):
            vars(self).update(_methods(self))
        return prepare_model(self, model, *args, **kwargs)

    accelerator.prepare_model = prepare


def _methods(accelerator: Any) -> dict[str, Any]:
    """Methods of an accelerator of parallelized models, by name: what it saves, loads and gathers is the whole."""
    get_state_dict, gather_for_metrics = accelerator.get_state_dict, accelerator.gather_for_metrics
    save_state, load_state = accelerator.save_state, accelerator.load_state

    def full(model: Any, unwrap: bool = True) -> Any:
        return full_state_dict(model) if _is_parallel(model) else get_state_dict(model, unwrap)

    def save(*args: Any, **kwargs: Any) -> Any:
        optimizers, models = accelerator._optimizers, accelerator._models
        states = [full_optimizer_state(each, models) for each in optimizers]
        accelerator._optimizers = [SimpleNamespace(state_dict=partial(dict, each)) for each in states]
        try:
            return save_state(*args, **kwargs)
        finally:
            accelerator._optimizers = optimizers

    def load(*args: Any, **kwargs: Any) -> Any:
        for optimizer in accelerator._optimizers:
            accept_full_state(optimizer, accelerator._models)
        hook = accelerator.register_load_state_pre_hook(_load_models)
        try:
            return load_state(*args, **kwargs)
        finally:
            hook.remove()

    def gather(input_data: Any, use_gather_object: bool = False) -> Any:
        ranks = getattr(accelerator.parallelism_config, "tp_size", 1)
        if ranks == 1 or (isinstance(input_data, Tensor) and not input_data.dim()):  # TRL divides its own counts
            return gather_for_metrics(input_data, use_gather_object)
        whole = accelerator.gather
        vars(accelerator)["gather"] = lambda tensors: _of_one_rank(whole(tensors), accelerator.num_processes, ranks)
        try:
            return gather_for_metrics(input_data, use_gather_object)
        finally:
            del vars(accelerator)["gather"]

    return {
        "_oases_methods": True, "get_state_dict": full, "save_state": save, "load_state": load,
        "gather_for_metrics": gather,
    }  # fmt: skip


def _load_models(models: list[Any], folder: str) -> None:
    """Load the parallelized models of an accelerator's folder, and take them off its list: safetensors' own
    `load_model` reads addresses of tensors, which DTensors do not have.
    """
    for number, model in enumerate(models):
        if _is_parallel(model):
            ending = f"_{number}" if number else ""
            file, pickled = Path(folder, f"model{ending}.safetensors"), Path(folder, f"pytorch_model{ending}.bin")
            load_weights(model, file if file.is_file() else torch.load(pickled, weights_only=True))
    models[:] = [each for each in models if not _is_parallel(each)]


def require_callable(model: Any, tool: str) -> None:
    """Raise UsageError for a model in stages or with sharded weights, which a tool would call, or wrap in DDP."""
    mesh = mesh_of(model)
    if mesh is None:
        return
    name = type(model).__name__
    if mesh.num_stages == 1:
        raise UsageError(
            f"{tool} was given {name} with 'pp' or fsdp, whose gradients oases averages and shards: train it in a "
            "custom training loop or by oases train --model, or give parallelize() a mesh without 'pp', leave fsdp "
            "out, and shard over its 'dp' by torch's fully_shard"
        )
    raise UsageError(
        f"{tool} was given {name} in pipeline stages, of which no rank can compute a loss alone: train it by "
        "loss = model.train_step(**batch) in a custom training loop or by oases train --model, or give parallelize() "
        "a mesh without 'pp'"
    )


def patch_parallelism(module: Any) -> None:
    """Have `accelerate.parallelism_config` take ranks on CPUs, once: it knows ranks on GPUs alone."""
    parallelism: Any = module.ParallelismConfig
    validate = parallelism._validate_accelerator
    if hasattr(validate, "__wrapped__"):
        return

    @wraps(validate)
    def validated(self: Any, accelerator: Any) -> None:
        on_cpus = str(accelerator.distributed_type).endswith("MULTI_CPU")
        validate(self, _Devices(accelerator) if on_cpus else accelerator)

    parallelism._validate_accelerator = validated


class _Devices:
    """Wrapper that reports several devices to a ParallelismConfig."""

    multi_device = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _is_parallel(model: Any) -> bool:
    return getattr(model, "oases_partition", None) is not None


def _of_one_rank(gathered: Any, processes: int, ranks: int) -> Any:
    """Rows of the first rank of each tensor-parallel group: the others had the same samples."""
    if isinstance(gathered, Tensor):
        rows = gathered.reshape(processes, -1, *gathered.shape[1:])[::ranks]
        return rows.reshape(-1, *gathered.shape[1:])
    if isinstance(gathered, dict):
        return type(gathered)({name: _of_one_rank(each, processes, ranks) for name, each in gathered.items()})
    return type(gathered)(_of_one_rank(each, processes, ranks) for each in gathered)
