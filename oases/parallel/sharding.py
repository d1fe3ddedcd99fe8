"""Which parameters of a model are cut over the tensor-parallel group, and where."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def sharded_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter, int]]:
    """(name, parameter, dimension that is cut over the tensor-parallel group), each parameter once.

    A module says which of its parameters are cut, and where, by its attribute `shard_dims`.
    """
    found: dict[int, tuple[str, nn.Parameter, int]] = {}
    for prefix, child, name, dim in _cut(module):
        parameter = getattr(child, name)
        found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter, dim))
    return list(found.values())


def holders(module: nn.Module) -> dict[int, nn.Module]:
    """The module that says it is cut, by the id of the parameter; where it has a group, that group cuts it."""
    found: dict[int, nn.Module] = {}
    for _, child, name, _ in _cut(module):
        found.setdefault(id(getattr(child, name)), child)
    return found


def _cut(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, int]]:
    for prefix, child in module.named_modules():
        for name, dim in getattr(child, "shard_dims", {}).items():
            if getattr(child, name, None) is not None:
                yield prefix, child, name, dim
