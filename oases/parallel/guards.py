"""Guards against wrappers and functions of torch that take this rank's shards for the whole model.

torch does not know what a plain parameter is a part of. DistributedDataParallel over tensor-parallel ranks would
overwrite every rank's shards with the first rank's; `clip_grad_norm_` would compute another norm on each rank.
Modules with sharded parameters are registered here, and both are refused for them. DistributedDataParallel is checked
when a module is registered in it, by torch's hook for that; `clip_grad_norm_` by a wrapper of its second half.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import clip_grad

import oases.parallel.state_shards as state_shards
from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_of
from oases.parallel.sharding import sharded_modules, sharded_parameters

_holders: WeakSet[nn.Module] = WeakSet()
_clips_whole = clip_grad._clip_grads_with_norm_


def register_shards(module: nn.Module) -> None:
    """Refuse wrong uses of this module's sharded parameters from now on; those of its submodules, too."""
    for holder, _ in sharded_modules(module):
        if getattr(holder, "tensor_parallel", 1) > 1:
            _holders.add(holder)
            clip_grad._clip_grads_with_norm_ = _clip_grads_with_norm
            state_shards.install(registered_shards)


def registered_shards() -> dict[int, tuple[nn.Parameter, str]]:
    """Sharded parameters of all live registered modules, with their names there, by id."""
    found: dict[int, tuple[nn.Parameter, str]] = {}
    for holder in list(_holders):
        for name, parameter, _ in sharded_parameters(holder):
            found[id(parameter)] = (parameter, f"{type(holder).__name__}.{name}")
    return found


def _clip_grads_with_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Clip as torch does. UsageError for sharded parameters, whose norm over all ranks torch does not know."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shards = registered_shards()
    for parameter in given:
        if id(parameter) in shards:
            raise UsageError(
                f"torch.nn.utils.clip_grad_norm_ was given {shards[id(parameter)][1]}, which is sharded over "
                "tensor-parallel ranks: it would clip by another norm on each rank; call "
                "oases.clip_grad_norm(model, max_norm) on all ranks"
            )
    _clips_whole(given, max_norm, total_norm, foreach)


def _refuse_replication(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise UsageError where DistributedDataParallel is given a module sharded over two or more of its ranks."""
    if not isinstance(wrapper, nn.parallel.DistributedDataParallel) or name != "module" or module is None:
        return
    ranks = set(dist.get_process_group_ranks(wrapper.process_group))
    ignored: set[str] = wrapper.parameters_to_ignore
    for holder, path in sharded_modules(module):
        group: ProcessGroup | None = group_of(getattr(holder, "_group_name", ""))
        if group is None or len(ranks & set(dist.get_process_group_ranks(group))) < 2:
            continue
        for own, _, _ in sharded_parameters(holder):
            full = f"{path}.{own}" if path else own
            if full not in ignored:
                raise UsageError(
                    f"DistributedDataParallel over ranks {sorted(ranks)} would overwrite {full}, which is sharded "
                    f"over ranks {dist.get_process_group_ranks(group)}, with the shard of one rank; give it the "
                    'data-parallel group alone, process_group=mesh.get_group("dp"), or train without it where all '
                    "ranks are tensor-parallel (accelerate and the Trainer of transformers wrap models in it, too)"
                )


register_module_module_registration_hook(_refuse_replication)
