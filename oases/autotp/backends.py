"""Backends of torch.distributed for the groups of a parallelized model: one that is named, or the faster of two."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from oases.core.execution.group import ProcessGroup, all_gather_objects, resolve
from oases.errors import UsageError

_NUMBERS = 1 << 20
"""float32 numbers of an all-reduce that is timed: 4 MB, some thousand tokens of a layer."""
_WIDTH, _MATMULS = 1024, 4
"""Matmuls beside it, of square float32 matrices: a backend that slows them is no faster."""
_ROUNDS = 5


def with_backend(mesh: Any, backend: str | None, device: torch.device | None = None) -> tuple[Any, list[str]]:
    """Make new groups of a mesh's ranks over a backend, e.g. "staged". Collective over them. None: the mesh itself.

    mesh: a DeviceMesh without "pp", a process group, or None for the default group. "auto": `staged`, unless the
    mesh's own tensor-parallel group sums tensors of `device` sooner, measured here. Returns the mesh, and what was
    measured in a line. UsageError for anything else, for an unknown backend, and where there is no group.
    """
    if backend is None:
        return mesh, []
    if backend != "auto" and backend not in dist.Backend.backend_list:
        known = ", ".join(name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
        raise UsageError(f"unknown backend {backend!r:.80}; known are {known}, and auto")
    of_mesh = isinstance(mesh, DeviceMesh) and "pp" not in (mesh.mesh_dim_names or ())
    if mesh is not None and not of_mesh and not isinstance(mesh, ProcessGroup):
        start = "" if backend == "auto" else f", and start the run over it: init_process_group({backend!r})"
        raise UsageError(
            f"backend {backend!r} is for tensor-parallel groups and meshes of torch without 'pp'; leave it out{start}"
        )
    groups = [mesh.get_group(at) for at in range(mesh.ndim)] if of_mesh else _groups_of(resolve(mesh))
    if not groups:
        raise UsageError(
            f"backend {backend!r} needs ranks; start them, e.g. by torchrun, and call init_process_group"
        )
    if backend != "auto":
        return _of_groups(mesh, [_again(group, backend) for group in groups]), []
    names = mesh.mesh_dim_names or () if of_mesh else ()
    at = names.index("tp") if "tp" in names else 0
    if device is None or device.type == "meta":
        device = torch.device(mesh.device_type if of_mesh else "cpu")
    trial, said = _tried(groups, at, device)
    if trial is None:
        return mesh, [said]
    return _of_groups(mesh, [trial if of == at else _again(group, "staged") for of, group in enumerate(groups)]), [
        said
    ]


def _tried(groups: list[ProcessGroup], at: int, device: torch.device) -> tuple[ProcessGroup | None, str]:
    """Group of `staged` of the ranks of groups[at] where it is the faster one, else None, and why. Collective.

    groups: of all dimensions of a mesh. Replicas choose alike, for their groups are made together. A trial that lost
    is kept, asleep: torch names groups by how many there are, and the next one of its name would read its addresses.
    """
    trial, why = None, "staged cannot join other ranks of the mesh"
    try:
        trial = _again(groups[at], "staged")
    except ValueError as error:  # of all ranks of the group: it cannot join them
        found, why = [0.0, math.inf], str(error).splitlines()[0]
    else:
        found = _seconds([groups[at], trial], device)
    for group in groups:
        found = [max(of) for of in zip(*all_gather_objects(found, group), strict=True)]
    own, staged = found
    if staged == math.inf:
        return None, f"backend auto: {why}; the mesh keeps its own groups"
    times = f"{1e3 * staged:.2f} ms by staged, {1e3 * own:.2f} ms by {dist.get_backend(groups[at])}"
    return trial if staged < own else None, f"backend auto: an all-reduce beside matmuls takes {times}"


def _groups_of(group: ProcessGroup | None) -> list[ProcessGroup]:
    return [] if group is None else [group]


def _of_groups(mesh: Any, groups: list[ProcessGroup]) -> Any:
    """Rebuild a DeviceMesh, or a group, from new process groups of its ranks, one for each dimension."""
    if not isinstance(mesh, DeviceMesh):
        return groups[0]
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    names = cast("tuple[str, ...]", mesh.mesh_dim_names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)


def _again(group: ProcessGroup, backend: str) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return cast(ProcessGroup, dist.new_group(ranks, backend=backend, use_local_synchronization=True))


def _seconds(groups: list[ProcessGroup], device: torch.device) -> list[float]:
    """Median seconds of an all-reduce beside matmuls by each of some groups, on this rank. Collective.

    They take turns, so that a machine that slows down slows all.
    """
    summed = torch.zeros(_NUMBERS, device=device)
    matrix = torch.ones(_WIDTH, _WIDTH, device=device)

    def seconds(by: ProcessGroup) -> float:
        dist.barrier(by)
        start = time.perf_counter()
        work = dist.all_reduce(summed, group=by, async_op=True)
        for _ in range(_MATMULS):
            matrix @ matrix
        work.wait()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    turns = [[seconds(by) for by in groups] for _ in range(1 + _ROUNDS)]
    return [median(of) for of in zip(*turns[1:], strict=True)]  # the first makes connections and streams
