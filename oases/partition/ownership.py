"""Cut parameters in the modules of their author: the same names, this rank's part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from oases.parallel.group import ProcessGroup, group_name, group_rank, group_size
from oases.parallel.sharding import Cut


def cut_parameters(root: nn.Module, cuts: Mapping[str, Cut], group: ProcessGroup | None) -> None:
    """Replace parameters of `root` by this rank's parts of them, in every module of `root` that holds them.

    cuts: by the parameter's name in `root`. Each owner says so by the instance's `shard_dims`, `shard_segments`,
    `tensor_parallel` and the group's name. Parameters on meta stay there.
    """
    made = {
        id(root.get_parameter(name)): (cut, part_of(root.get_parameter(name), cut, group))
        for name, cut in cuts.items()
    }
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in made:
                cut, part = made[id(parameter)]
                setattr(module, name, part)
                declare(module, name, cut, group)


def part_of(parameter: nn.Parameter, cut: Cut, group: ProcessGroup | None) -> nn.Parameter:
    """A parameter of this rank's part, in memory of its own."""
    whole: Tensor = parameter.detach()
    part = cut.take(whole, group_rank(group), group_size(group)).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def declare(module: nn.Module, name: str, cut: Cut, group: ProcessGroup | None) -> None:
    """Have a module say that its parameter `name` is cut over a group."""
    for attribute, value in (("shard_dims", cut.dim), ("shard_segments", cut.segments)):
        if attribute not in vars(module):
            setattr(module, attribute, dict(getattr(module, attribute, {})))
        getattr(module, attribute)[name] = value
    setattr(module, "_group_name", group_name(group))  # noqa: B010
    setattr(module, "tensor_parallel", group_size(group))  # noqa: B010
