"""What a layer needs to know of its tensor-parallel group: size, rank, c10d name and the overlap scheduler.

A group is always an argument. `None` means the default group, or a group of one where torch.distributed is
not initialised; with a group of one every layer is the ordinary torch layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from oases._C import OverlapScheduler

ProcessGroup = dist.ProcessGroup


def resolve(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group itself, the default group for None, or None where there is only this process."""
    if process_group is not None:
        return process_group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


class HoldsGroup:
    """A module's process group, held by name: a module alive at exit must not keep a destroyed group's threads."""

    _group_name = ""
    _group_rank = 0
    tensor_parallel = 1
    """The group's size."""

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


def group_name(process_group: ProcessGroup | None) -> str:
    """The c10d name that ops carry; "" for None."""
    return "" if process_group is None else process_group.group_name


def group_of(name: str) -> ProcessGroup | None:
    """The group of a c10d name, the inverse of `group_name`. RuntimeError once it was destroyed."""
    c10d_name: Any = name
    return _resolve_process_group(c10d_name) if name else None


def nccl_options(max_ctas: int = 8) -> Any:
    """Options for an NCCL group whose collectives shall hide under compute; pass them as `pg_options`.

    The stream has high priority, so that a collective starts while products are queued, and a collective takes at
    most `max_ctas` of the GPU's multiprocessors from them. Groups that oases makes itself have them. RuntimeError
    where this torch has no NCCL.
    """
    if not dist.is_nccl_available():
        raise RuntimeError(
            "this torch was built without NCCL; leave out the options, or install a CUDA build of torch"
        )
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = max_ctas
    return options


def refuse_capture(x: Tensor) -> None:
    """Raise RuntimeError while a CUDA graph is captured: tickets are timed and waited for by the host's program."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "overlapped layers cannot be captured into a CUDA graph: their collectives are started and accounted for "
            "by the host in every step; leave them out of the capture"
        )


def scheduler_of(process_group: ProcessGroup) -> Any:
    """The OverlapScheduler that every layer of this group shares."""
    return OverlapScheduler.of(process_group.group_name)


def shard_size(what: str, size: int, process_group: ProcessGroup | None) -> int:
    """`size` divided by the group size; a ValueError names what does not divide and what would."""
    parts = group_size(process_group)
    if size % parts:
        fits = [t for t in range(1, 65) if size % t == 0]
        raise ValueError(
            f"{what} is {size}, which does not divide by the tensor-parallel degree {parts}; "
            f"degrees that divide it: {', '.join(map(str, fits))}"
        )
    return size // parts
