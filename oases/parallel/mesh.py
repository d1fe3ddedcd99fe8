"""The process groups in which one pipeline stage of a plan runs.

A stage of R ranks runs a segment of degree t as R / t replicas: ranks g * t .. g * t + t - 1 are the tensor-parallel
group of replica g, which has the g-th share of the samples. Ranks with the same place in their replicas form a
data-parallel group. Where a segment of degree a meets one of degree b = k * a, k replicas of the one are a replica of
the other, and the ranks among those with the same place, modulo a, form a resharding group, in order of the samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from oases.errors import UsageError
from oases.parallel.group import ProcessGroup, group_name, group_of, group_rank, group_size, nccl_options, resolve
from oases.planner.plan import Plan

Layout = tuple[tuple[int, ...], ...]
"""Ranks of the stage, cut into groups."""


def require_runnable(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot be executed, ScheduleError for a segment's schedule that cannot."""
    if len(plan.stages) > 1:
        raise UsageError(
            f"plan: it has {len(plan.stages)} pipeline stages, and pipelines cannot be executed yet; take a plan of "
            "one stage"
        )
    require_nested(segment.tp for segment in plan.stages[0].segments)
    for segment in plan.stages[0].segments:
        segment.generated()


def require_nested(degrees: Iterable[int]) -> None:
    """Raise UsageError unless of any two tensor-parallel degrees one divides the other."""
    ordered = sorted(set(degrees))
    for smaller, larger in itertools.pairwise(ordered):
        if larger % smaller:
            raise UsageError(
                f"plan: segments of tp {smaller} and tp {larger} do not nest, so no rank's samples could be handed "
                "on whole; take degrees of which one divides the next, such as powers of two"
            )


class Mesh:
    """The groups of one stage by what they are for, each made once. All ranks make it together.

    degrees: the tensor-parallel degrees that will be asked for. process_group: the ranks of the stage; None is the
    default group. timeout: of their collectives; None is the backend's own. Groups are held by name, so a mesh keeps
    no destroyed group alive. Raises UsageError for degrees that do not divide the ranks or do not nest.
    """

    def __init__(
        self,
        degrees: Iterable[int],
        *,
        process_group: ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        stage = resolve(process_group)
        self.ranks, self.rank = group_size(stage), group_rank(stage)
        self.degrees = tuple(sorted(set(degrees)))
        require_nested(self.degrees)
        for degree in self.degrees:
            if degree < 1 or self.ranks % degree:
                raise UsageError(f"plan: tp {degree} does not divide the {self.ranks} ranks of the run")
        self._stage_name = group_name(stage)
        self._members = [0] if stage is None else dist.get_process_group_ranks(stage)
        self._tensor: dict[Layout, str] = {}
        self._data: dict[Layout, str] = {}
        options = {"timeout": timeout, "pg_options": _options(stage)}
        for degree in self.degrees:
            self._make(self._tensor, self._replicas(degree), options)
            # Groups of their own even where the ranks are those of a tensor-parallel group: sums that a block waits
            # for must not queue behind buckets of gradients.
            self._make(self._data, self._strided(self.ranks, degree), options)
        for larger in self.degrees:
            for smaller in self.degrees:
                if smaller < larger:
                    self._make(self._tensor, self._strided(larger, smaller), options)

    @classmethod
    def of(cls, plan: Plan, *, process_group: ProcessGroup | None = None, timeout: timedelta | None = None) -> Mesh:
        """The mesh of a plan's only stage.

        Raises UsageError where the plan cannot be executed or is for another number of ranks.
        """
        require_runnable(plan)
        ranks = group_size(resolve(process_group))
        if plan.world != ranks:
            raise UsageError(f"plan: it is for {plan.world} ranks, the run has {ranks}; start as many as it says")
        degrees = (segment.tp for segment in plan.stages[0].segments)
        return cls(degrees, process_group=process_group, timeout=timeout)

    @property
    def stage(self) -> ProcessGroup | None:
        """All ranks; None for this process alone."""
        return group_of(self._stage_name)

    def tensor(self, degree: int) -> ProcessGroup | None:
        """The tensor-parallel group of this rank at a degree."""
        return group_of(self._tensor[self._replicas(degree)])

    def data(self, degree: int) -> ProcessGroup | None:
        """The ranks that hold the same parameters as this one in segments of a degree."""
        return group_of(self._data[self._strided(self.ranks, degree)])

    def resharding(self, degree: int, other: int) -> ProcessGroup | None:
        """The ranks that hand samples to each other between segments of two different degrees."""
        return group_of(self._tensor[self._strided(max(degree, other), min(degree, other))])

    def replica(self, degree: int) -> int:
        """Which share of the samples this rank has in segments of a degree."""
        return self.rank // degree

    def replicas(self, degree: int) -> int:
        """Into how many shares the samples are cut."""
        return self.ranks // degree

    @property
    def groups(self) -> list[ProcessGroup]:
        """All groups of this rank that were made here and have more than one rank."""
        found = [group_of(name) for names in (self._tensor, self._data) for name in names.values()]
        return [group for group in found if group is not None and group.size() > 1]

    def destroy(self) -> None:
        """End the groups made here; for a process that goes on without them."""
        for names in (self._tensor, self._data):
            for name in names.values():
                group = group_of(name)
                if group is not None:
                    dist.destroy_process_group(group)
            names.clear()

    def _replicas(self, degree: int) -> Layout:
        return tuple(tuple(range(first, first + degree)) for first in range(0, self.ranks, degree))

    def _strided(self, block: int, stride: int) -> Layout:
        """Within each `block` consecutive ranks, those with the same place modulo `stride`."""
        return tuple(
            tuple(range(first + place, first + block, stride))
            for first in range(0, self.ranks, block)
            for place in range(stride)
        )

    def _make(self, names: dict[Layout, str], layout: Layout, options: dict[str, Any]) -> None:
        if layout in names:
            return
        names[layout] = ""
        for ranks in layout:
            if self._stage_name:
                group = dist.new_group([self._members[rank] for rank in ranks], **options)
                if self.rank in ranks:
                    names[layout] = group_name(group)


def _options(stage: ProcessGroup | None) -> Any:
    return nccl_options() if stage is not None and "nccl" in dist.get_backend_config(stage) else None
