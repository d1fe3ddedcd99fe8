"""Which layers of a list differ in their weights alone, and can share what is found of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from oases.autotp.experts import keep_whole
from oases.autotp.export import UnsplittableError
from oases.autotp.layers import Called, LayerList
from oases.autotp.operations import Place
from oases.autotp.program import Kind
from oases.autotp.spec import ParallelSpec
from oases.autotp.watch import hooks_inside, worth


def kinds_of(found: LayerList, model: nn.Module, spec: ParallelSpec, place: Place) -> list[Kind | UnsplittableError]:
    """The kind of each layer, one object for layers of one kind; what was raised for those that have none.

    model: the author's, whose layers are asked for hooks, which the twins do not have.
    """
    groups: dict[Any, list[int]] = {}
    indices = _indices([call.module for call in found.calls])
    for at, (call, path) in enumerate(zip(found.calls, found.paths, strict=True)):
        kept = frozenset(
            name
            for name, _ in call.module.named_parameters()
            if name in found.strangers or spec.keeps_whole(f"{path}.{name}" if path else name)
        )
        refused = hooks_inside(model.get_submodule(path))
        if path in found.assigned:
            refused = f"{type(call.module).__name__} sets {', '.join(found.assigned[path])} in its forward"
        groups.setdefault((_look(call.module, indices), _form(call), call.ops, kept, refused), []).append(at)
    kinds: dict[int, Kind | UnsplittableError] = {}
    for (*_, kept, refused), members in groups.items():
        kinds.update(dict.fromkeys(members, _kind(found.calls[members[0]], kept, refused, place)))
    return [kinds[at] for at in range(len(found.calls))]


def _kind(call: Called, kept: frozenset[str], refused: str, place: Place) -> Kind | UnsplittableError:
    if refused:
        return UnsplittableError(refused)
    keep_whole(call.module, kept)
    try:
        return Kind(call.module, call.args, call.kwargs, kept.__contains__, place)
    except UnsplittableError as error:
        return error


def _look(module: nn.Module, ignored: set[tuple[str, str]]) -> tuple[Any, ...]:
    """Classes, attributes, shapes and shared weights of a module and all within it."""
    shared: dict[int, int] = {}
    return tuple(
        (
            path,
            type(part),
            tuple((name, worth(v)) for name, v in sorted(vars(part).items())
                  if not name.startswith("_") and (path, name) not in ignored and name != "training"),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad, shared.setdefault(id(p), len(shared)))
                  for name, p in part._parameters.items() if p is not None),
            tuple((name, tuple(b.shape), b.dtype) for name, b in part.named_buffers(recurse=False)),
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
