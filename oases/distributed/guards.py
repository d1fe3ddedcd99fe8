"""Guards against wrappers and functions of torch that take this rank's shards for the whole model.

torch does not know what a plain parameter is a part of. DistributedDataParallel over tensor-parallel ranks would
overwrite every rank's shards with the first rank's, FSDP would mix the shards of all; `clip_grad_norm_` would compute
another norm on each rank; an optimizer made before would go on with the replaced parameters. Modules with sharded
parameters are registered here. DistributedDataParallel and FSDP1 are refused when such a module is registered in
them, by torch's hook for that, and `replicate` when it registers a list of such parameters; FSDP2 when it takes a
parameter, by a wrapper; ZeroRedundancyOptimizer before its first step. torch's total norm is replaced by one over all
ranks, and clipping of shards by another norm refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

import oases.distributed.state_shards as state_shards
from oases.core.blocks.sharding import Cut, cuts, sharded_modules, sharded_parameters, watch_shards
from oases.core.execution.group import ProcessGroup, group_of, group_size
from oases.distributed.collectives import gather
from oases.distributed.replicas import averaged_parameters, replicas_of
from oases.distributed.total_norm import install as install_total_norm
from oases.distributed.total_norm import is_total
from oases.errors import UsageError

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""Module of torch with FSDP2's parameters; patched once it is imported, because that takes half a second."""
_WRAPPED = {"DistributedDataParallel": "module", "FullyShardedDataParallel": "_fsdp_wrapped_module"}
"""Names of the wrapped module in torch's wrappers."""
_ZERO = "ZeroRedundancyOptimizer"
_AVERAGED = (
    "{} around a model that averages its gradients by itself, over the mesh's data-parallel dimension; call the "
    "model as it is, or, where parameters around it are trained, too, leave that dimension out: "
    'oases.parallelize(model, mesh=mesh["tp"])'
)
_holders: WeakSet[nn.Module] = WeakSet()
_stages: WeakSet[nn.Module] = WeakSet()
"""Models of which this rank has one stage of a pipeline, or shards of all weights."""
_seen: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers whose steps are right."""
_before_steps: Any = None
"""Handle of the hook before steps of optimizers."""
_SHARDED = "_oases_sharded"
"""Attribute of a parameter that a shard replaced."""
_clips_whole = clip_grad._clip_grads_with_norm_


def guard_shards(module: nn.Module) -> None:
    """Refuse wrong uses of this module's sharded parameters from now on; those of its submodules, too."""
    for holder, _ in sharded_modules(module):
        if getattr(holder, "tensor_parallel", 1) > 1:
            _holders.add(holder)
            _check_steps()
            _replace_clipping()
            install_total_norm(_groups_of_gradients, _refuse_stages)
            state_shards.install(registered_shards)
            _guard_fsdp2()


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
    _seen.add(optimizer)


def register_stage(model: nn.Module) -> None:
    """Refuse torch's gradient norms, clipping and wrappers for a stage of a pipeline from now on."""
    _stages.add(model)
    _replace_clipping()
    install_total_norm(_groups_of_gradients, _refuse_stages)


def _replace_clipping() -> None:
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = _clip_grads_with_norm


def _refuse_stages(tensors: Iterable[Tensor]) -> None:
    """Raise UsageError for parameters, or gradients, of a model of which this rank has one stage."""
    staged = {
        id(tensor): type(model).__name__
        for model in list(_stages)
        for parameter in model.parameters()
        for tensor in (parameter, parameter.grad)
    }
    for tensor in tensors:
        if id(tensor) in staged:
            raise UsageError(
                "torch.nn.utils.get_total_norm, clip_grad_norm_ or clip_grads_with_norm_ was given parameters or "
                f"gradients of {staged[id(tensor)]}, of which this rank has one stage, or shards, and would take the "
                "norm of these alone; call oases.clip_grad_norm(model, max_norm) on all ranks, whose result is the "
                "norm of all"
            )


def _groups_of_gradients() -> dict[int, str]:
    """Name of the group of each shard's gradient, by the gradient's id."""
    return {
        id(parameter.grad): getattr(holder, "_group_name", "")
        for holder in list(_holders)
        for _, parameter, _ in sharded_parameters(holder)
        if parameter.grad is not None
    }


def registered_shards() -> dict[int, tuple[nn.Parameter, str]]:
    """Sharded parameters of all live registered modules, with their names there, by id."""
    found: dict[int, tuple[nn.Parameter, str]] = {}
    for holder in list(_holders):
        for name, parameter, _ in sharded_parameters(holder):
            found[id(parameter)] = (parameter, f"{type(holder).__name__}.{name}")
    return found


def whole_rows(parameter: Tensor) -> Tensor:
    """Full tensor of a parameter that is sharded by rows, differentiable; any other tensor itself. Collective."""
    for holder in list(_holders):
        cut = cuts(holder).get(id(parameter))
        if cut is not None and any(parameter is each for each in holder.parameters()):
            group = group_of(getattr(holder, "_group_name", ""))
            return gather(parameter.t(), group, Cut(-1, cut.segments), "gathered rows").t()
    return parameter


def _clip_grads_with_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Clip as torch does. UsageError for stages, and for sharded parameters and a norm that is not over all ranks."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shards = registered_shards()
    _refuse_stages(given)
    for parameter in given:
        if id(parameter) in shards and not is_total(total_norm):
            raise UsageError(
                f"clip_grads_with_norm_ was given {shards[id(parameter)][1]}, which is sharded over tensor-parallel "
                "ranks, and a norm of this rank alone: it would clip by another norm on each; give it "
                "torch.nn.utils.get_total_norm(gradients) of gradients as they are in .grad, or call "
                "torch.nn.utils.clip_grad_norm_"
            )
    _clips_whole(given, max_norm, total_norm, foreach)


def _guard_fsdp2() -> None:
    """Check the parameters that `fully_shard` takes from now on."""
    fsdp2: Any = sys.modules.get(_FSDP2)
    if fsdp2 is None or hasattr(fsdp2.FSDPParam.__init__, "__wrapped__"):
        return
    take = fsdp2.FSDPParam.__init__

    @wraps(take)
    def checked(self: Any, param: nn.Parameter, module_info: Any, mesh_info: Any, *others: Any, **named: Any) -> None:
        holder = module_info.module
        if id(param) in averaged_parameters():
            raise UsageError(_AVERAGED.format("fully_shard"))
        if holder in _holders and any(param is each for _, each, _ in sharded_parameters(holder)):
            name = f"{type(holder).__name__}.{module_info.param_name}"
            _require_apart("fully_shard", set(mesh_info.mesh.mesh.flatten().tolist()), holder, name)
        take(self, param, module_info, mesh_info, *others, **named)

    fsdp2.FSDPParam.__init__ = checked


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
    ignored: set[str] = cast(Any, wrapper).parameters_to_ignore if ddp else set()
    for holder, path in sharded_modules(module):
        # FSDP1 has already replaced the parameters.
        for own in [each for each, _, _ in sharded_parameters(holder)] if ddp else [""]:
            full = f"{path}.{own}".strip(".")
            if full not in ignored:
                _require_apart(kind, ranks, holder, full)


register_module_module_registration_hook(_refuse_replication)
watch_shards(guard_shards)
