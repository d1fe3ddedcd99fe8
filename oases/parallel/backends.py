"""Groups of the same ranks over another backend of torch.distributed."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, resolve


def with_backend(mesh: object, backend: str) -> DeviceMesh | ProcessGroup:
    """Make new groups of a mesh's ranks over a backend, e.g. "staged". Collective over them.

    mesh: a DeviceMesh without "pp", a process group, or None for the default group. UsageError for anything else, for
    an unknown backend, and where there is no group.
    """
    if backend not in dist.Backend.backend_list:
        known = ", ".join(name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
        raise UsageError(f"unknown backend {backend!r:.80}; known are {known}")
    if isinstance(mesh, DeviceMesh) and "pp" not in (mesh.mesh_dim_names or ()):
        groups = [_again(mesh.get_group(at), backend) for at in range(mesh.ndim)]
        if mesh.ndim == 1:
            return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
        return DeviceMesh.from_group(
            groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=cast("tuple[str, ...]", mesh.mesh_dim_names)
        )
    if mesh is not None and not isinstance(mesh, ProcessGroup):
        raise UsageError(
            f"backend {backend!r} is for tensor-parallel groups and meshes of torch without 'pp'; leave it out, and "
            f"start the run over it: init_process_group({backend!r})"
        )
    group = resolve(mesh)
    if group is None:
        raise UsageError(
            f"backend {backend!r} needs ranks; start them, e.g. by torchrun, and call init_process_group"
        )
    return _again(group, backend)


def _again(group: ProcessGroup, backend: str) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return cast(ProcessGroup, dist.new_group(ranks, backend=backend, use_local_synchronization=True))
