"""Process groups of one pipeline stage of a plan.

A stage of R ranks runs a segment of tensor-parallel degree t as R / t replicas: ranks g * t .. g * t + t - 1 are the
tensor-parallel group of replica g, which gets the g-th share of the samples. Ranks with the same place in their
replicas form a data-parallel group. Where segments of degree a and b = k * a meet, k replicas of the first are one
replica of the second; of their ranks those with the same place, modulo a, form a resharding group, in order of the
samples. Stage s of p has the s-th of p equal parts of the run's ranks; ranks with the same place in their stages are
peers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from oases.core.execution.group import (
    ProcessGroup,
    group_name,
    group_of,
    group_rank,
    group_size,
    nccl_options,
    resolve,
)
from oases.errors import UsageError
from oases.plans.check import degrees_of, require_nested
from oases.plans.plan import Plan

Layout = tuple[tuple[int, ...], ...]
"""Ranks of the stage, divided into groups."""


class Mesh:
    """Process groups of one stage, each created once. Collective: all ranks create it together.

    degrees: the tensor-parallel degrees in use. process_group: all ranks of the run; None for the default group.
    timeout: of collectives; None for the backend's default. stage: number of this mesh's stage of `num_stages`; ranks
    of other stages take part in the creation but are not members. fsdp: create groups for gathering weights. order:
    the run's ranks, by their numbers in the default group, in the order used above; None for their own order.
    separate_groups: create a group of the stage's ranks besides the tensor-parallel ones. Groups are held by name, so
    a mesh keeps no destroyed group alive. Raises UsageError for degrees that do not divide the ranks or do not nest.
    """

    def __init__(
        self,
        degrees: Iterable[int],
        *,
        process_group: ProcessGroup | None = None,
        timeout: timedelta | None = None,
        stage: int = 0,
        num_stages: int = 1,
        fsdp: bool = False,
        order: Sequence[int] | None = None,
        separate_groups: bool = False,
    ) -> None:
        run = resolve(process_group)
        self.stage, self.num_stages, self.timeout = stage, num_stages, timeout
        self.ranks = group_size(run) // num_stages
        self._everyone = [0] if run is None else dist.get_process_group_ranks(run)
        place = group_rank(run)
        if order is not None:
            if sorted(order) != sorted(self._everyone):
                raise UsageError(f"order must have each rank of the run once, got {list(order)}")
            place = list(order).index(self._everyone[place])
            self._everyone = list(order)
        self.rank = place - stage * self.ranks
        self.degrees = tuple(sorted(set(degrees)))
        require_nested(self.degrees)
        for degree in self.degrees:
            if degree < 1 or self.ranks % degree:
                raise UsageError(f"plan: tp {degree} does not divide the {self.ranks} ranks of the run")
        self._run_name = group_name(run)
        self._members = self._everyone[stage * self.ranks : (stage + 1) * self.ranks]
        self._peers: dict[tuple[int, ...], str] = {}
        self._tensor: dict[Layout, str] = {}
        self._data: dict[Layout, str] = {}
        self._weights: dict[Layout, str] = {}
        self._stage: dict[Layout, str] = {}
        if self.degrees == (group_size(run),) and order is None and not separate_groups:
            self._tensor[self._replicas(self.ranks)] = self._run_name
        if separate_groups and num_stages > 1:
            self._make(self._stage, self._replicas(self.ranks))
        for degree in self.degrees:
            self._make_groups(degree, fsdp)
        self.meet()

    def _make_groups(self, degree: int, fsdp: bool) -> None:
        self._make(self._tensor, self._replicas(degree))
        # Separate groups even for the ranks of a tensor-parallel group: all-reduces that a block waits for must not
        # queue behind gradient buckets.
        self._make(self._data, self._strided(self.ranks, degree), of_one=False)
        if fsdp:  # weights that a block waits for must not queue behind them either
            self._make(self._weights, self._strided(self.ranks, degree), of_one=False)
        for smaller in self.degrees:
            if smaller < degree:
                self._make(self._tensor, self._strided(degree, smaller))

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        process_group: ProcessGroup | None = None,
        timeout: timedelta | None = None,
        order: Sequence[int] | None = None,
    ) -> Mesh:
        """Mesh of this rank's stage of a checked plan. Collective: all ranks create the meshes of all stages
        together.

        Raises UsageError where the plan is for another number of ranks.
        """
        run = resolve(process_group)
        if plan.world != group_size(run):
            raise UsageError(
                f"plan: it is for {plan.world} ranks, the run has {group_size(run)}; start {plan.world} ranks"
            )
        mine = cls.of_stages(
            [degrees_of(plan, stage) for stage in range(len(plan.stages))], process_group=run, timeout=timeout,
            order=order, fsdp=plan.fsdp or plan.zero, separate_groups=plan.experts is not None,
        )  # fmt: skip
        if len(plan.end_stages) > 1:
            mine.peers(plan.end_stages)
        return mine

    @classmethod
    def of_stages(cls, degrees: Sequence[Iterable[int]], **options: Any) -> Mesh:
        """Mesh of this rank's stage of a pipeline. degrees: of each stage. Collective over all ranks."""
        made = [cls(each, stage=stage, num_stages=len(degrees), **options) for stage, each in enumerate(degrees)]
        return next(mesh for mesh in made if 0 <= mesh.rank < mesh.ranks)

    def meet(self) -> None:
        """Wait for all ranks of the run, with gloo: one that destroyed a group would fail those still connecting."""
        run = group_of(self._run_name)
        if run is not None and "nccl" not in dist.get_backend_config(run):
            dist.barrier(run)

    def group_options(self, max_ctas: int = 8) -> dict[str, Any]:
        """Options of one group of this run; max_ctas: of NCCL's."""
        run = group_of(self._run_name)
        if run is None or "nccl" not in dist.get_backend_config(run):
            return {"timeout": self.timeout, "pg_options": None}
        options = nccl_options(max_ctas)
        if self.timeout is not None:
            options._timeout = self.timeout  # torch takes that of the options, and warns where the other differs
        return {"timeout": self.timeout, "pg_options": options}

    def members_of(self, stage: int) -> list[int]:
        """Ranks of a stage, by their numbers in the default group."""
        return self._everyone[stage * self.ranks : (stage + 1) * self.ranks]

    def peer(self, stage: int) -> int:
        """This rank's peer in another stage, by its number in the default group."""
        return self.members_of(stage)[self.rank]

    def on_one_node(self, degree: int) -> bool:
        """Whether each tensor-parallel group of this degree, of all stages, has its ranks on one node.

        Nodes are as torchrun numbers ranks: LOCAL_WORLD_SIZE on each, and one node where that is not set. On nodes of
        different sizes only single ranks are known to be.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", len(self._everyone)))
        if len(self._everyone) % local:
            return degree == 1
        nodes = [rank // local for rank in self._everyone]
        return all(len(set(nodes[at : at + degree])) == 1 for at in range(0, len(nodes), degree))

    @property
    def embedding_group(self) -> ProcessGroup | None:
        """Peers of the first and last stage, which share tied embeddings; None on stages between them."""
        return group_of(self._peers.get((0, self.num_stages - 1), ""))

    @property
    def run(self) -> ProcessGroup | None:
        """All ranks of the run."""
        return group_of(self._run_name)

    def peers(self, stages: Sequence[int]) -> str:
        """Name of the group of this rank's peers in some stages; "" on ranks of other stages. Created at first use.

        Collective: all ranks of the run ask for the same stages, in the same order.
        """
        key = tuple(stages)
        if key not in self._peers:
            self._peers[key] = ""
            for members in zip(*(self.members_of(stage) for stage in key), strict=True):
                group = dist.new_group(sorted(members), **self.group_options())
                if dist.get_rank() in members:
                    self._peers[key] = group_name(group)
        return self._peers[key]

    @property
    def stage_group(self) -> ProcessGroup | None:
        """All ranks of this stage; with several stages only where created with separate_groups."""
        return group_of(self._run_name if self.num_stages == 1 else self._stage[self._replicas(self.ranks)])

    def tensor(self, degree: int) -> ProcessGroup | None:
        """Tensor-parallel group of this rank at a degree."""
        return group_of(self._tensor[self._replicas(degree)])

    def data(self, degree: int) -> ProcessGroup | None:
        """Data-parallel group of this rank for segments of a degree; None for a group of one."""
        return group_of(self._data[self._strided(self.ranks, degree)])

    def weights(self, degree: int) -> ProcessGroup | None:
        """Ranks of `data(degree)` as a group for gathering weights, in a mesh with fsdp."""
        return group_of(self._weights[self._strided(self.ranks, degree)])

    def resharding(self, degree: int, other: int) -> ProcessGroup | None:
        """Ranks that exchange samples between segments of two different degrees."""
        return group_of(self._tensor[self._strided(max(degree, other), min(degree, other))])

    def replica(self, degree: int) -> int:
        """Number of this rank's replica, and so of its share of the samples, at a degree."""
        return self.rank // degree

    def replicas(self, degree: int) -> int:
        """Number of replicas at a degree."""
        return self.ranks // degree

    @property
    def _all(self) -> tuple[dict[Layout, str], ...]:
        return self._tensor, self._data, self._weights, self._stage

    @property
    def groups(self) -> list[ProcessGroup]:
        """All groups of this rank that the mesh has created, of more than one rank."""
        made = [name for names in self._all for name in names.values() if name != self._run_name]
        found = [group_of(name) for name in [*made, *self._peers.values()]]
        return [group for group in found if group is not None and group.size() > 1]

    def destroy(self) -> None:
        """Destroy the groups created by the mesh, for a process that continues without them."""
        for names in self._all:
            for name in names.values():
                group = group_of(name) if name != self._run_name else None
                if group is not None:
                    dist.destroy_process_group(group)
            names.clear()
        for name in self._peers.values():
            group = group_of(name)
            if group is not None:
                dist.destroy_process_group(group)
        self._peers.clear()

    def _replicas(self, degree: int) -> Layout:
        return tuple(tuple(range(first, first + degree)) for first in range(0, self.ranks, degree))

    def _strided(self, block: int, stride: int) -> Layout:
        """Within each `block` consecutive ranks, those with the same place modulo `stride`."""
        return tuple(
            tuple(range(first + place, first + block, stride))
            for first in range(0, self.ranks, block)
            for place in range(stride)
        )

    def _make(self, names: dict[Layout, str], layout: Layout, *, of_one: bool = True) -> None:
        """Create the groups of a layout. of_one: also groups of one rank, for layers, to which None is the default
        group.
        """
        if layout in names:
            return
        names[layout] = ""
        if len(layout[0]) == 1 and not of_one:
            return
        for ranks in layout:
            if self._run_name:
                members = [self._members[rank] for rank in ranks]
                if members != sorted(members):  # torch would sort them, which would swap shares of the batch
                    raise UsageError(f"order must rise within each group, got {members}")
                # Options of its own: torch writes the group's name and ranks into them.
                group = dist.new_group(members, **self.group_options())
                if self.rank in ranks:
                    names[layout] = group_name(group)


def mesh_of(model: Any) -> Mesh | None:
    """Mesh of a model that `parallelize` divided into stages; None for any other."""
    training = getattr(model, "oases_pipeline", None)
    found: Mesh | None = None if training is None else training.mesh
    return found


def run_of(model: Any, process_group: ProcessGroup | None) -> ProcessGroup | None:
    """All ranks that train a model: process_group, else those of its mesh, else the default group."""
    mesh = mesh_of(model)
    return resolve(process_group) if process_group is not None or mesh is None else mesh.run
