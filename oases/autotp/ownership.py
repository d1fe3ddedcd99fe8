"""Cut parameters in the modules of their author: the same names, this rank's part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_name, group_rank, group_size
from oases.parallel.sharding import Cut


def cut_parameters(roots: Iterable[tuple[nn.Module, Mapping[str, Cut]]], group: ProcessGroup | None) -> None:
    """Replace parameters by this rank's parts of them, in every module of all roots that holds them.

    roots: modules, each with its cuts by the parameter's name in it. What several modules share they go on sharing.
    Each owner says so by the instance's `shard_dims`, `shard_segments`, `tensor_parallel` and the group's name.
    Parameters on meta stay there. UsageError, with nothing changed, where one is needed in two ways.
    """
    roots = list(roots)
    wanted: dict[int, tuple[nn.Parameter, Cut | None, str]] = {}
    for root, cuts in roots:
        mine = {id(root.get_parameter(name)): cut for name, cut in cuts.items()}
        for name, parameter in root.named_parameters():
            cut = mine.get(id(parameter))
            _, other, elsewhere = wanted.setdefault(id(parameter), (parameter, cut, name))
            if other != cut:
                raise UsageError(
                    f"{name} is shared by layers that need it cut in different ways ({elsewhere}: {other}, {name}: "
                    f"{cut}, None is whole); give spec=ParallelSpec(replicate=('*.{name}', '*.{elsewhere}'))"
                )
    made = {key: part_of(whole, cut, group) for key, (whole, cut, _) in wanted.items() if cut is not None}
    for root, _ in roots:
        for module in root.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) in made:
                    _, cut, _ = wanted[id(parameter)]
                    assert cut is not None
                    setattr(module, name, made[id(parameter)])
                    declare(module, name, cut, group)


def part_of(parameter: nn.Parameter, cut: Cut, group: ProcessGroup | None) -> nn.Parameter:
    """A parameter of this rank's part, in memory of its own."""
    whole: Tensor = parameter.detach()
    part = cut.take(whole, group_rank(group), group_size(group)).clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # what others wrote on it: optimizers' groups are told by attributes
    return made


def declare(module: nn.Module, name: str, cut: Cut, group: ProcessGroup | None) -> None:
    """Have a module say that its parameter `name` is cut over a group."""
    for attribute, value in (("shard_dims", cut.dim), ("shard_segments", cut.segments)):
        if attribute not in vars(module):
            setattr(module, attribute, dict(getattr(module, attribute, {})))
        getattr(module, attribute)[name] = value
    setattr(module, "_group_name", group_name(group))  # noqa: B010
    setattr(module, "tensor_parallel", group_size(group))  # noqa: B010
