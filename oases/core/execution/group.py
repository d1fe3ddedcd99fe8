"""Process groups: size, rank, c10d name and overlap scheduler of a tensor-parallel group.

A group is always an argument. `None` means the default group, or a group of one where torch.distributed is not
initialised; with a group of one every layer is the ordinary torch layer.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from oases.extension import OverlapScheduler

ProcessGroup = dist.ProcessGroup
_T = TypeVar("_T")


def resolve(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group itself, the default group for None, or None where there is only this process.

    TypeError for anything else.
    """
    if process_group is not None:
        if not isinstance(process_group, ProcessGroup):
            raise TypeError(
                f"a process group was expected, got {process_group!r:.80}; give one of torch.distributed.new_group, "
                "mesh.get_group(name) of a DeviceMesh, or None for the default group"
            )
        return process_group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


class HoldsGroup:
    """Mixin that holds a process group by name: a module alive at exit must not keep a destroyed group's threads."""

    _group_name = ""
    _group_rank = 0
    tensor_parallel = 1
    """Size of the group."""

    @property
    def process_group(self) -> ProcessGroup | None:
        """The tensor-parallel group; None for this process alone. RuntimeError once it was destroyed."""
        return group_of(self._group_name)

    @process_group.setter
    def process_group(self, group: ProcessGroup | None) -> None:
        self._group_name, self._group_rank = group_name(group), group_rank(group)
        self.tensor_parallel = group_size(group)


def group_size(process_group: ProcessGroup | None) -> int:
    """Number of ranks in the resolved group; 1 for None."""
    return 1 if process_group is None else process_group.size()


def group_rank(process_group: ProcessGroup | None) -> int:
    """This process's rank within the resolved group; 0 for None."""
    return 0 if process_group is None else process_group.rank()


def all_gather_objects(mine: _T, process_group: ProcessGroup | None) -> list[_T]:
    """Gather an object from every rank, in rank order: `mine` alone for None. Collective over the group."""
    everyone: list[Any] = [mine] * group_size(process_group)
    if process_group is not None and len(everyone) > 1:
        dist.all_gather_object(everyone, mine, group=process_group)
    return everyone


def group_name(process_group: ProcessGroup | None) -> str:
    """The c10d name that ops carry; "" for None."""
    return "" if process_group is None else process_group.group_name


def group_of(name: str) -> ProcessGroup | None:
    """Group of a c10d name, the inverse of `group_name`. RuntimeError once it was destroyed."""
    c10d_name: Any = name
    return _resolve_process_group(c10d_name) if name else None


def nccl_options(max_ctas: int = 8) -> Any:
    """Options for an NCCL group whose collectives overlap with compute; pass them as `pg_options`.

    The stream has high priority, so that a collective starts while matmuls are queued, and a collective takes at most
    `max_ctas` of the GPU's multiprocessors. Groups created by oases have these options. RuntimeError where this torch
    has no NCCL.
    """
    if not dist.is_nccl_available():
        raise RuntimeError(
            "this torch was built without NCCL; leave out the options, or install a CUDA build of torch"
        )
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = max_ctas
    return options


def scheduler_of(process_group: ProcessGroup) -> Any:
    """The group's OverlapScheduler, shared by all its layers."""
    return OverlapScheduler.of(process_group.group_name)
