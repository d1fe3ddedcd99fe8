"""Process groups of expert parallelism of a degree of its own, as Megatron's `expert_model_parallel_size`.

The ranks of a stage, replica by replica and tensor-parallel ranks next to each other, are divided into groups of
`degree` consecutive ranks: with the ranks of a node next to each other, a degree of at most their number stays inside
it. A group holds every expert once; ranks with the same place in their groups hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from oases.core.blocks.sharding import holders
from oases.core.execution.group import ProcessGroup, group_name, group_of, nccl_options
from oases.errors import UsageError

EXPERT_MODES = ("sharded", "balanced")
"""Ways of `parallelize` with the experts of unedited models."""


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of one rank, held by name. expert: ranks that experts are divided over, `degree` of them.

    data: ranks with the same experts, over which their gradients are averaged; "" where there is one. scale: factor
    on an expert's gradient, which is summed over its tokens of the whole group, before that average. weights: with
    fsdp or a stage's zero a second group of the ranks of data, for gathering experts; both are groups then, also of
    one rank.
    """

    expert: str
    data: str
    degree: int
    scale: float
    weights: str = ""


def expert_groups(
    stages: Sequence[Sequence[int]], tensor_parallel: int, degree: int | None, *, sharded: bool = False
) -> ExpertGroups:
    """Groups of this rank. Collective: all ranks of the default group create those of all stages.

    stages: ranks of each, by their numbers in the default group. degree: None for all ranks of a stage. sharded:
    create `ExpertGroups.weights`. UsageError for a degree that does not divide the ranks, or that neither divides the
    tensor-parallel degree nor is a multiple of it, and for ranks without a stage.
    """
    number = len(stages[0])
    size = number if degree is None else degree
    fits = [n for n in range(1, number + 1) if number % n == 0
            and (n % tensor_parallel == 0 or tensor_parallel % n == 0)]  # fmt: skip
    if size not in fits:
        raise UsageError(
            f"expert_parallel {size} does not fit {number} ranks of which {tensor_parallel} are tensor-parallel; "
            f"degrees that fit: {', '.join(map(str, fits))}"
        )
    everyone = dist.get_world_size() if dist.is_initialized() else 1
    if sum(map(len, stages)) != everyone:
        raise UsageError(
            f"experts='balanced' over {sum(map(len, stages))} of {everyone} ranks; give a mesh of all ranks of the "
            "run"
        )
    expert = data = weights = ""
    for ranks in stages:
        for first in range(0, number, size):
            expert = _group(ranks[first : first + size]) or expert
        for place in range(size):
            data = _group(ranks[place::size], of_one=sharded) or data
            weights = (_group(ranks[place::size], of_one=True) if sharded else "") or weights
    # The sum over the ranks with the same experts, over the number of replicas, as an average over those ranks.
    return ExpertGroups(expert, data, size, tensor_parallel / size, weights)


def _group(ranks: Sequence[int], *, of_one: bool = False) -> str:
    """Name of a new group that this rank is in; "" for a group of others and, unless of_one, for one rank."""
    if len(ranks) == 1 and not of_one:
        return ""
    options = nccl_options() if "nccl" in dist.get_backend_config() else None
    made = dist.new_group(list(ranks), pg_options=options)
    return group_name(made) if dist.get_rank() in ranks else ""


_GROUPS = "_expert_groups"
"""Attribute of a module with experts: its `ExpertGroups`."""


def declare_experts(module: nn.Module, groups: ExpertGroups) -> None:
    """Record on a module that its sharded parameters are experts, replicated over groups.data."""
    setattr(module, _GROUPS, groups)


def groups_of_experts(module: nn.Module | None) -> ExpertGroups | None:
    """Groups of a module with experts; None for any other."""
    found: ExpertGroups | None = getattr(module, _GROUPS, None)
    return found


def averaged_parts(
    model: nn.Module, data: ProcessGroup | None
) -> list[tuple[list[nn.Parameter], ProcessGroup | None]]:
    """Trainable parameters of a model by the group that their gradients are averaged over: data, or of experts."""
    return [
        (found, group) for group, found in _by_group(model, [p for p in model.parameters() if p.requires_grad], data)
    ]


def averaging_group(model: nn.Module, parameter: nn.Parameter, data: ProcessGroup | None) -> ProcessGroup | None:
    """Group that a parameter's gradient is averaged over: data, or that of its experts."""
    ((group, _),) = _by_group(model, [parameter], data)
    return group


def _by_group(
    model: nn.Module, parameters: Iterable[nn.Parameter], data: ProcessGroup | None
) -> list[tuple[ProcessGroup | None, list[nn.Parameter]]]:
    shards = holders(model)
    found: dict[str, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups = groups_of_experts(shards.get(id(parameter)))
        found.setdefault(group_name(data) if groups is None else groups.data, []).append(parameter)
    return [(group_of(name), each) for name, each in found.items()]
