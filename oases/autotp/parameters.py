"""Parameters replaced by this rank's shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from oases.core.blocks.sharding import Cut, cuts, register_shards
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.distributed.expert_groups import ExpertGroups, declare_experts
from oases.distributed.guards import register_replaced
from oases.errors import UsageError


def cut_parameters(
    roots: Iterable[tuple[nn.Module, Mapping[str, Cut]]],
    group: ProcessGroup | None,
    experts: Collection[nn.Module] = (),
    groups: ExpertGroups | None = None,
) -> None:
    """Replace parameters by this rank's shards, in every module of all roots that holds them.

    roots: modules, each with its cuts by parameter name. experts: modules that are cut over the ranks of
    groups.expert instead. Shared parameters stay shared. Each owner gets the attributes `shard_dims`,
    `shard_segments`, `tensor_parallel` and the group's name. Meta parameters stay on meta, and shards of an earlier
    call stay as they are. UsageError, with nothing changed, where a parameter would be cut in two ways.
    """
    roots = list(roots)
    held = {key: cut for root, _ in roots for key, cut in cuts(root).items()}
    wanted: dict[int, tuple[nn.Parameter, Cut | None, str]] = {}
    for root, by_name in roots:
        mine = {id(root.get_parameter(name)): cut for name, cut in by_name.items()}
        for name, parameter in root.named_parameters():
            cut = mine.get(id(parameter))
            _, other, elsewhere = wanted.setdefault(id(parameter), (parameter, cut, name))
            if other != cut:
                raise UsageError(
                    f"{name} is shared by layers that need it cut in different ways ({elsewhere}: {other}, {name}: "
                    f"{cut}, None is replicated); give spec=ParallelSpec(replicate=('*.{name}', '*.{elsewhere}'))"
                )
        _require_as_before(root, mine, held)
    wanted = {key: each for key, each in wanted.items() if key not in held}
    of_experts = {id(parameter) for module in experts for parameter in module.parameters()}
    balanced = None if groups is None else group_of(groups.expert)
    by_key = {key: balanced if key in of_experts else group for key in wanted}
    made = {key: part_of(whole, cut, by_key[key]) for key, (whole, cut, _) in wanted.items() if cut is not None}
    for root, _ in roots:
        for module in root.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) in made:
                    _, cut, _ = wanted[id(parameter)]
                    assert cut is not None
                    setattr(module, name, made[id(parameter)])
                    declare(module, name, cut, by_key[id(parameter)])
                    if groups is not None and id(parameter) in of_experts:
                        declare_experts(module, groups)


def _require_as_before(root: nn.Module, wanted: Mapping[int, Cut], held: Mapping[int, Cut]) -> None:
    """Raise UsageError for a shard that would have to be cut otherwise."""
    for name, parameter in root.named_parameters():
        if id(parameter) in held and held[id(parameter)] != wanted.get(id(parameter)):
            raise UsageError(
                f"{name} is sharded ({held[id(parameter)]}), and with what was added to its layer it would be "
                f"otherwise ({wanted.get(id(parameter))}, None is replicated); add that before parallelize()"
            )


def part_of(parameter: nn.Parameter, cut: Cut, group: ProcessGroup | None) -> nn.Parameter:
    """This rank's shard of a parameter, in memory of its own."""
    whole: Tensor = parameter.detach()
    part = cut.take(whole, group_rank(group), group_size(group)).clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # attributes set by others, such as marks for optimizer groups
    register_replaced(parameter)
    return made


def declare(module: nn.Module, name: str, cut: Cut, group: ProcessGroup | None) -> None:
    """Record on a module that its parameter `name` is sharded over a group."""
    for attribute, value in (("shard_dims", cut.dim), ("shard_segments", cut.segments)):
        if attribute not in vars(module):
            setattr(module, attribute, dict(getattr(module, attribute, {})))
        getattr(module, attribute)[name] = value
    setattr(module, "_group_name", group_name(group))  # noqa: B010
    setattr(module, "tensor_parallel", group_size(group))  # noqa: B010
    register_shards(module)
