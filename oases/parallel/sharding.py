"""Which parameters of a model are cut over the tensor-parallel group, and where."""

from __future__ import annotations

from torch import nn


def sharded_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter, int]]:
    """(name, parameter, dimension that is cut over the tensor-parallel group), each parameter once.

    A module says which of its parameters are cut, and where, by its attribute `shard_dims`.
    """
    found: dict[int, tuple[str, nn.Parameter, int]] = {}
    for prefix, child in module.named_modules():
        for name, dim in getattr(child, "shard_dims", {}).items():
            parameter = getattr(child, name, None)
            if parameter is not None:
                found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter, dim))
    return list(found.values())
