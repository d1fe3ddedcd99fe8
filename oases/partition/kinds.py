"""Which layers of a list differ in their weights alone, and can share what is found of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from oases.partition.export import UnsplittableError, export
from oases.partition.layers import Called, LayerList
from oases.partition.operations import Place
from oases.partition.program import Kind
from oases.partition.spec import ParallelSpec

_PLAIN = (int, float, str, bool, type(None), tuple)


def kinds_of(found: LayerList, spec: ParallelSpec, place: Place) -> list[Kind | UnsplittableError]:
    """The kind of each layer, one object for layers of one kind; what was raised for those that have none."""
    groups: dict[Any, list[int]] = {}
    modules = [call.module for call in found.calls]
    indices = _indices(modules)
    for at, call in enumerate(found.calls):
        groups.setdefault((_look(call.module, indices), _form(call)), []).append(at)
    kinds: dict[int, Kind | UnsplittableError] = {}
    for members in groups.values():
        alike = _same_graph(found.calls[members[0]], found.calls[members[-1]])
        shared = _kind(found, members[0], spec, place)
        for at in members:
            kinds[at] = shared if alike or at == members[0] else _kind(found, at, spec, place)
    return [kinds[at] for at in range(len(modules))]


def _kind(found: LayerList, at: int, spec: ParallelSpec, place: Place) -> Kind | UnsplittableError:
    call = found.calls[at]
    prefix = f"{found.name}.{at}." if found.name else ""
    try:
        return Kind(call.module, call.args, call.kwargs, lambda name: spec.keeps_whole(prefix + name), place)
    except UnsplittableError as error:
        return error


def _look(module: nn.Module, ignored: set[tuple[str, str]]) -> tuple[Any, ...]:
    """Classes, plain attributes and shapes of a module and all within it."""
    return tuple(
        (
            path,
            type(part).__qualname__,
            tuple((name, repr(v)) for name, v in sorted(vars(part).items())
                  if isinstance(v, _PLAIN) and (path, name) not in ignored and name != "training"),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad)
                  for name, p in part.named_parameters(recurse=False)),
        )
        for path, part in module.named_modules()
    )  # fmt: skip


def _indices(modules: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """The attributes that count the layers."""
    counting: set[tuple[str, str]] | None = None
    for at, module in enumerate(modules):
        mine = {(path, name) for path, part in module.named_modules() for name, v in vars(part).items()
                if type(v) is int and v == at}  # fmt: skip
        counting = mine if counting is None else counting & mine
    return counting or set()


def _form(call: Called) -> str:
    """What else of a call may change the graph: which arguments there are."""
    return repr(
        [type(each).__name__ for each in call.args] + sorted((k, type(v).__name__) for k, v in call.kwargs.items())
    )


def _same_graph(first: Called, last: Called) -> bool:
    """Whether two layers give the same graph: an index may be more than a name to them."""
    if first is last:
        return True
    try:
        graphs = [export(call.module, call.args, call.kwargs).graph for call in (first, last)]
    except UnsplittableError:
        return True  # neither has one; the kind says why
    seen = [[(str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes] for graph in graphs]
    return seen[0] == seen[1]
