"""Tracing of layers of one kind once: of equal layers in a list the first is traced, stand-ins replace the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_NUMBERS = ("idx", "index", "layer_id", "layer_number")
"""Parts of the names of attributes that number a layer; layers that differ in them alone are equal."""

Progress = Callable[[int, int], None]
"""(layers traced so far, layers to trace)."""


@contextmanager
def layers_once(model: nn.Module, on_layer: Progress | None = None) -> Iterator[dict[str, str]]:
    """Context in which repeated layers return their input; yields each such layer's path with that of the first.

    A layer equals an earlier one of its list if classes, shapes of parameters and plain attributes of all its modules
    are equal. In the context it returns its activation, and what else the first one returned.
    """
    alike: dict[str, str] = {}
    replaced: list[tuple[nn.Module, Any]] = []
    results: dict[str, Any] = {}
    first: dict[str, nn.Module] = {}
    for list_path, layers in outermost_lists(model):
        known: dict[Any, str] = {}
        for number, layer in enumerate(layers):
            path = f"{list_path}.{number}" if list_path else str(number)
            of = known.setdefault(_signature(layer), path)
            if of == path:
                first[path] = layer
            else:
                alike[path] = of
    equal = set(alike.values())
    try:
        for number, (path, layer) in enumerate(first.items(), start=1):
            replaced.append((layer, vars(layer).get("forward")))
            tell = partial(on_layer, number, len(first)) if on_layer is not None else None
            layer.forward = partial(_noted, layer.forward, path, results if path in equal else {}, tell)
        for path, of in alike.items():
            layer = model.get_submodule(path)
            replaced.append((layer, vars(layer).get("forward")))
            layer.forward = partial(_stand_in, layer.forward, of, results)
        yield alike
    finally:
        put_back(replaced)


def put_back(replaced: Sequence[tuple[nn.Module, Any]]) -> None:
    """Undo replacements of layers' forwards, each with the attribute before it, None for none; the last one first."""
    for layer, own in reversed(replaced):
        if own is None:
            del layer.forward
        else:
            layer.forward = own


def _noted(
    forward: Callable[..., Any], path: str, results: dict[str, Any], tell: Callable[[], None] | None, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Run a layer and note its result."""
    if tell is not None:
        tell()
    results[path] = found = forward(*args, **kwargs)
    return found


def _stand_in(forward: Callable[..., Any], of: str, results: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of layer `of`, with this call's activation in place of its first tensor.

    The layer itself runs where no argument has the shape of that.
    """
    made = next((leaf for leaf in tree_leaves(results.get(of)) if isinstance(leaf, Tensor)), None)
    given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    x = next((each for each in given if made is not None and each.shape == made.shape), None)
    if x is None:
        return forward(*args, **kwargs)
    passed = x.clone()
    return tree_map(lambda leaf: passed if leaf is made else leaf, results[of])


def outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Lists of two layers or more, with their paths; none of those inside of another."""
    seen: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}." if other else "") for other in seen)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not inside:
            seen.append(path)
            yield path, module


def _signature(layer: nn.Module) -> Any:
    """Key of a layer: classes, shapes and plain attributes, equal for equal layers."""
    return (
        tuple((name, tuple(each.shape), each.dtype) for name, each in layer.named_parameters()),
        tuple((name, tuple(each.shape), each.dtype) for name, each in layer.named_buffers()),
        tuple((name, type(module), _plain(module)) for name, module in layer.named_modules()),
    )


def _plain(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and not any(part in name for part in _NUMBERS)
    )
