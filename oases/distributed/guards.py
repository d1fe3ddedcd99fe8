"""Guards against wrappers and functions of torch that take this rank's shards for the whole model.

torch does not know what a plain parameter is a part of, such as a weight of the layers that this package offers.
DistributedDataParallel over tensor-parallel ranks would overwrite every rank's shards with the first rank's, FSDP
would mix the shards of all; `clip_grad_norm_` would compute another norm on each rank; an optimizer made before would
go on with the replaced parameters. Modules with sharded parameters are registered here. DistributedDataParallel and
FSDP1 are refused when such a module is registered in them, by a hook of torch, and `replicate` when it registers
a list of such parameters; FSDP2, which torch itself refuses for DTensors of the same ranks, and
ZeroRedundancyOptimizer before the first step; torch.distributed.checkpoint when it asks for a plain shard. torch's
total norm is replaced by one over all ranks, and clipping of plain shards by another norm refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oases.core.blocks.sharding import sharded_modules, sharded_parameters, watch_shards
from oases.core.execution.dtensors import is_dtensor
from oases.core.execution.group import ProcessGroup, group_of, group_size
from oases.distributed.dtensors import TP, is_fsdp_shard, is_fused, is_tensor_parallel, local_above
from oases.distributed.failures import raise_together
from oases.distributed.pieces import PlainShard, refused_shard
from oases.distributed.replicas import averaged_parameters, replicas_of
from oases.distributed.total_norm import install as install_total_norm
from oases.distributed.total_norm import is_total
from oases.errors import UsageError

_WRAPPED = {"DistributedDataParallel": "module", "FullyShardedDataParallel": "_fsdp_wrapped_module"}
"""Names of the wrapped module in torch's wrappers."""
_ZERO = "ZeroRedundancyOptimizer"
_AVERAGED = (
    "{} around a model that averages its gradients by itself, over the mesh's data-parallel dimension; call the "
    "model as it is, or, where parameters around it are trained, too, parallelize() the module that holds all of "
    'them; for fully_shard leave that dimension out: oases.parallelize(model, mesh=mesh["tp"])'
)
_holders: WeakSet[nn.Module] = WeakSet()
_stages: WeakSet[nn.Module] = WeakSet()
"""Models of which this rank has one stage of a pipeline, or shards of all weights."""
_seen: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers whose steps are right."""
_before_steps: Any = None
"""Handle of the hook before steps of optimizers."""
_LOADING = ("_load_model_state_dict", "_load_optim_state_dict")
"""Functions of torch.distributed.checkpoint.state_dict."""
_WHOLE = ("Muon", "LBFGS")
"""Optimizers that compute with whole matrices, or with all of them at once."""
_SHARDED = "_oases_sharded"
"""Attribute of a parameter that a shard replaced."""
_clips_whole = clip_grad._clip_grads_with_norm_


def guard_shards(module: nn.Module) -> None:
    """Refuse wrong uses of this module's sharded parameters from now on; those of its submodules, too."""
    for holder, _ in sharded_modules(module):
        if getattr(holder, "tensor_parallel", 1) > 1 and holder not in _holders:
            _holders.add(holder)
            holder.register_state_dict_post_hook(_mark_shards)
            object.__setattr__(holder, "_fqn_modifiers", partial(_refuse_state_dicts, holder))
            _check_steps()
            _replace_clipping()


def _plain(holder: nn.Module) -> dict[str, nn.Parameter]:
    """Sharded parameters of a module that are no DTensors, by their names there."""
    held = {name: holder._parameters.get(name) for name in getattr(holder, "shard_dims", {})}
    return {name: each for name, each in held.items() if each is not None and not is_dtensor(each)}


def _mark_shards(holder: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Have torch.distributed.checkpoint refuse the plain shards in a state dict."""
    for name in _plain(holder):
        if type(state.get(prefix + name)) is Tensor:
            state[prefix + name] = state[prefix + name].as_subclass(PlainShard)


def _refuse_state_dicts(holder: nn.Module) -> dict[str, str]:
    """Raise UsageError where functions of torch.distributed.checkpoint.state_dict ask for a module's names.

    They ask for `_fqn_modifiers` of each module above a tensor, the names that they leave out.
    """
    for name in _plain(holder):
        raise refused_shard(f"{type(holder).__name__}.{name}")
    fused = [name for name, each in holder._parameters.items() if is_fused(each)]
    if fused and getattr(local_above("info", _LOADING), "full_state_dict", False):
        raise UsageError(
            f"{type(holder).__name__}.{fused[0]} is fused of several parts, of which this rank has a piece each, and "
            "full_state_dict=True would load the first rows of all; call model.load_state_dict(state) with full "
            "tensors on all ranks, or oases.load_weights, or leave the option out"
        )
    return {}


def register_replaced(parameter: nn.Parameter) -> None:
    """Refuse steps of optimizers with this parameter, in whose place a shard is now: they would change nothing."""
    parameter.__dict__[_SHARDED] = True
    _check_steps()


def _check_steps() -> None:
    global _before_steps
    if _before_steps is None:
        _before_steps = register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _seen:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    old = [each for each in held if _SHARDED in getattr(each, "__dict__", {})]
    if old:
        raise UsageError(
            f"{type(optimizer).__name__} was made before parallelize(), which put shards in the place of {len(old)} "
            f"of its {len(held)} parameters, such as one of shape {list(old[0].shape)}; make it afterwards"
        )
    if any(each.__name__ == _ZERO and each.__module__.startswith("torch.") for each in type(optimizer).__mro__):
        ranks = set(dist.get_process_group_ranks(cast(Any, optimizer).process_group))
        _refuse_shared(_ZERO, ranks, held)
    _refuse_fsdp2(held)
    _judge(getattr(optimizer, "inner", optimizer), held)
    require_own_state(
        (f"{name} of parameter {number}", value, each)
        for number, each in enumerate(held)
        for name, value in optimizer.state.get(each, {}).items()
    )
    _seen.add(optimizer)
    optimizer.register_load_state_dict_post_hook(_seen.discard)


def require_own_state(given: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise UsageError on all ranks where one has loaded a shard of another, of a file that one saved. Collective.

    given: name, value and parameter of each tensor of a state.
    """
    placed = [each for each in given if is_tensor_parallel(each[1]) and is_tensor_parallel(each[2])]
    for group in placed[0][2].device_mesh.get_all_groups() if placed else ():
        with raise_together(group):
            for name, value, parameter in placed:
                there, here = value.device_mesh.get_coordinate(), parameter.device_mesh.get_coordinate()
                if there != here and not all(each.is_replicate() for each in value.placements):
                    raise UsageError(
                        f"{name} is the shard of rank {there} of its mesh, and this is rank {here}; load on each "
                        "rank what it saved, or save by model.save_pretrained, torch.distributed.checkpoint or "
                        "oases.save_checkpoint"
                    )


def _judge(optimizer: torch.optim.Optimizer, held: list[Tensor]) -> None:
    """Refuse an optimizer that needs whole matrices of plain shards, or fails on DTensors; warn of a slow one."""
    name, placed, plain = type(optimizer).__name__, sum(map(is_tensor_parallel, held)), _plain_shards()
    shards = [plain[id(each)] for each in held if id(each) in plain]
    if name == "Adafactor" and (placed or shards or any(map(is_fsdp_shard, held))):
        raise UsageError(
            "Adafactor sums over rows and columns of whole matrices, which fails on DTensors (in torch and in "
            "transformers), and would be wrong on shards; use AdamW, or Muon, which is right on DTensors"
        )
    if shards and name in _WHOLE:
        raise UsageError(
            f"{name} computes with whole matrices, and {shards[0]} is this rank's shard, and no DTensor; leave it "
            f"and the {len(shards) - 1} others like it to another optimizer, such as AdamW"
        )
    text = ""
    if shards and placed and not type(optimizer).__module__.startswith("torch.optim."):
        text = f"{name} updates {shards[0]}, this rank's plain shard: right only if it works element by element"
    if placed and name in _WHOLE:
        text = f"{name} multiplies whole matrices, and torch gathers those of {placed} DTensors in every step"
    if text:
        warnings.warn(text, stacklevel=5)


def register_stage(model: nn.Module) -> None:
    """Have torch's gradient norms know a stage of a pipeline, and refuse wrappers of it, from now on."""
    _stages.add(model)
    _replace_clipping()


def _replace_clipping() -> None:
    install_total_norm(_groups_of_gradients, _stages)
    torch.nn.utils.clip_grads_with_norm_ = _clip_grads_with_norm  # clip_grad_norm_ gives a norm of all ranks


def _groups_of_gradients() -> dict[int, str]:
    """Name of the group of each plain shard's gradient, by the gradient's id."""
    return {
        id(parameter.grad): getattr(holder, "_group_name", "")
        for holder in list(_holders)
        for _, parameter, _ in sharded_parameters(holder)
        if parameter.grad is not None and not is_dtensor(parameter)
    }


def _plain_shards() -> dict[int, str]:
    """Names of the plain shards of all live registered modules, by id."""
    return {
        id(parameter): f"{type(holder).__name__}.{name}"
        for holder in list(_holders)
        for name, parameter, _ in sharded_parameters(holder)
        if not is_dtensor(parameter)
    }


def _clip_grads_with_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Clip as torch does. UsageError for plain shards, or a stage, and a norm that is not over all ranks."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shards = _plain_shards() | {
        id(parameter): f"{type(model).__name__}.{name}"
        for model in _stages
        for name, parameter in model.named_parameters()
    }
    for parameter in given:
        if id(parameter) in shards and not is_total(total_norm):
            raise UsageError(
                f"clip_grads_with_norm_ was given {shards[id(parameter)]}, which is sharded over tensor-parallel "
                "ranks, and a norm of this rank alone: it would clip by another norm on each; give it "
                "torch.nn.utils.get_total_norm(gradients) of gradients as they are in .grad, or call "
                "torch.nn.utils.clip_grad_norm_"
            )
    _clips_whole(given, max_norm, total_norm, foreach)


def _refuse_fsdp2(held: Sequence[Tensor]) -> None:
    """Refuse FSDP2 over ranks that have plain shards of one weight, and of models that average their gradients."""
    averaged, mine = averaged_parameters(), {id(each) for each in held}
    for each in held:
        if id(each) in averaged and is_dtensor(each) and each.device_mesh.mesh_dim_names != (TP,):  # type: ignore[attr-defined]
            raise UsageError(_AVERAGED.format("fully_shard"))
    for holder in list(_holders):
        for name, parameter, _ in sharded_parameters(holder):
            if id(parameter) in mine and is_fsdp_shard(parameter):
                ranks = set(parameter.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
                _require_apart("fully_shard", ranks, holder, f"{type(holder).__name__}.{name}")


def _require_apart(wrapper: str, ranks: set[int], holder: nn.Module, name: str) -> None:
    """Raise UsageError where two or more of a wrapper's ranks have shards of a parameter."""
    group: ProcessGroup | None = group_of(getattr(holder, "_group_name", ""))
    if group is None or len(ranks & set(dist.get_process_group_ranks(group))) < 2:
        return
    overwrites = wrapper in ("DistributedDataParallel", _ZERO)
    harm = "overwrite" if overwrites else "mix the shards of"
    means = "with the shard of one rank" if overwrites else "as if they were equal"
    how = 'mesh=mesh["dp"]' if wrapper == "fully_shard" else 'process_group=mesh.get_group("dp")'
    raise UsageError(
        f"{wrapper} over ranks {sorted(ranks)} would {harm} {name}, which is sharded over ranks "
        f"{dist.get_process_group_ranks(group)}, {means}; give it the data-parallel group alone, {how}, or train "
        "without it where all ranks are tensor-parallel (with accelerate: give the Accelerator a "
        f"ParallelismConfig(tp_size={group_size(group)}), so that it does not wrap the model)"
    )


def _refuse_shared(wrapper: str, ranks: set[int], parameters: Iterable[Tensor]) -> None:
    """Raise UsageError where two or more of a wrapper's ranks have shards of one of these parameters."""
    shards = {
        id(parameter): (holder, f"{type(holder).__name__}.{name}")
        for holder in list(_holders)
        for name, parameter, _ in sharded_parameters(holder)
    }
    for parameter in parameters:
        if id(parameter) in shards:
            _require_apart(wrapper, ranks, *shards[id(parameter)])


def _refuse_replication(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise UsageError where DDP, FSDP1 or torch.compile is given a module that it would break."""
    if type(wrapper).__name__ == "OptimizedModule" and getattr(module, "oases_partition", None) is not None:
        raise UsageError(
            f"torch.compile of {type(module).__name__}, which is parallelized: its layers run as traced graphs in an "
            "order of their own; leave torch.compile out, or compile their blocks by parallelize(compile='inductor')"
        )
    bases = (each.__name__ for each in type(wrapper).__mro__ if each.__module__.startswith("torch."))
    kind = next((each for each in bases if each in _WRAPPED), "")
    if _WRAPPED.get(kind) != name or module is None:
        return
    ddp = kind == "DistributedDataParallel"
    if module in _stages:
        raise UsageError(
            f"{kind} around {type(module).__name__}, of which this rank has one stage, or shards: its replicas "
            "average their gradients in model.train_step(**batch), and without stages in backward(); call the model "
            "without a wrapper"
        )
    if replicas_of(module) is not None:
        raise UsageError(_AVERAGED.format(kind))
    ranks = set(dist.get_process_group_ranks(cast(Any, wrapper).process_group))
    if isinstance(module, nn.ParameterList):  # of torch.distributed._composable.replicate
        averaged = averaged_parameters()
        if any(id(parameter) in averaged for parameter in module):
            raise UsageError(_AVERAGED.format("replicate"))
        _refuse_shared(kind, ranks, module)
    _refuse_parameters(kind, module, ranks, cast(Any, wrapper).parameters_to_ignore if ddp else set())


def _refuse_parameters(kind: str, module: nn.Module, ranks: set[int], ignored: set[str]) -> None:
    """Raise UsageError for shards that a wrapper would overwrite or mix, and for DTensors, which it does not take."""
    ddp = kind == "DistributedDataParallel"
    for holder, path in sharded_modules(module):
        # FSDP1 has already replaced the parameters.
        for own in [each for each, _, _ in sharded_parameters(holder)] if ddp else [""]:
            full = f"{path}.{own}".strip(".")
            if full not in ignored:
                _require_apart(kind, ranks, holder, full)
    if any(map(is_tensor_parallel, module.parameters())):
        raise UsageError(
            f"{kind} around {type(module).__name__}, whose parameters are DTensors, which it does not take; give "
            "parallelize() a mesh with 'dp', over which the model averages its gradients by itself, and call the "
            "model as it is"
        )


register_module_module_registration_hook(_refuse_replication)
watch_shards(guard_shards)
