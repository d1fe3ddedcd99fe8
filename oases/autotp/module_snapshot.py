"""Detect changes of a layer since it was traced; a graph does not follow later changes of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_WATCHED = (int, float, str, bool, type(None), torch.dtype, Tensor)


def inner_hooks(layer: nn.Module) -> str:
    """Error text naming the submodules that have hooks, which a graph would bypass; "" where none has.

    Hooks of the layer itself run, because the layer is still called.
    """
    found = [path for path, part in layer.named_modules() if part is not layer and _hooked(part)]
    return f"{', '.join(found)} has hooks, which would not be called" if found else ""


def _hooked(part: nn.Module) -> bool:
    """Whether there are hooks other than those by which transformers records outputs, which `ModelHooks` refuses."""
    if not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks):
        return False
    return any(not _records(hook) for each in _HOOKS for hook in getattr(part, each).values())


def _records(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def recorders(part: nn.Module) -> dict[int, Any]:
    """Forward hooks by which transformers records hidden states and attentions, by their numbers."""
    return {number: hook for number, hook in part._forward_hooks.items() if _records(hook)}


@contextmanager
def unrecorded(module: nn.Module) -> Iterator[None]:
    """Context in which transformers does not record what a module and its submodules compute."""
    found = [(part, recorders(part)) for part in module.modules() if part._forward_hooks]
    for part, hooks in found:
        for number in hooks:
            del part._forward_hooks[number]
    try:
        yield
    finally:
        for part, hooks in found:
            part._forward_hooks.update(hooks)


class ModuleSnapshot:
    """State of a traced layer that must not change. path: its name in the model.

    Weights, buffers, `requires_grad`, and train() and eval() of any submodule may change; hooks within the layer,
    attributes that a forward may read, and forward methods may not.
    """

    def __init__(self, layer: nn.Module, path: str) -> None:
        self._path = path
        self._parts = [(name, part, _attributes(part)) for name, part in layer.named_modules() if part is not layer]
        self._forwards = [vars(part).get("forward") for _, part, _ in self._parts]
        self._layer, self._own = layer, _attributes(layer)
        self._all = list(layer.modules())

    def modes(self) -> tuple[bool, ...]:
        """Training mode of each submodule, after the check. RuntimeError where the layer has changed."""
        for (name, part, attributes), forward in zip(self._parts, self._forwards, strict=True):
            if _hooked(part):
                raise RuntimeError(self._changed(name, "got hooks, which would not be called: add them"))
            if vars(part).get("forward") is not forward:
                raise RuntimeError(self._changed(name, "got another forward: put it there"))
            self._check(name, part, attributes)
        self._check("", self._layer, self._own)
        return tuple([part.training for part in self._all])

    def _check(self, name: str, part: nn.Module, attributes: dict[str, Any]) -> None:
        now = vars(part)
        for key, value in attributes.items():
            if now.get(key, self) is not value and (isinstance(value, Tensor) or now.get(key, self) != value):
                was, changed = (repr(value), repr(now.get(key))) if not isinstance(value, Tensor) else ("", "")
                raise RuntimeError(
                    self._changed(name, f"had {key}={was} and has {changed or 'another tensor'} now: set it")
                )

    def _changed(self, name: str, what: str) -> str:
        where = ".".join(each for each in (self._path, name) if each)
        return f"{where or 'the model'} {what} before parallelize(), which traced the layer as it was then"


def training_modes(layer: nn.Module) -> tuple[bool, ...]:
    """Training mode of each submodule of a layer."""
    return tuple(part.training for part in layer.modules())


def set_training_modes(layer: nn.Module, modes: tuple[bool, ...]) -> None:
    """Set the training mode of each submodule."""
    for part, training in zip(layer.modules(), modes, strict=True):
        part.training = training


def _attributes(part: nn.Module) -> dict[str, Any]:
    """Attributes that a forward may read, besides weights, buffers and modules."""
    ours = ("training", "tensor_parallel", "gradient_checkpointing", "forward")
    return {
        key: value
        for key, value in vars(part).items()
        if not key.startswith("_") and key not in ours and isinstance(value, _WATCHED)
    }


def assigned_attributes(module: nn.Module) -> Callable[[], list[str]]:
    """Function that returns the attributes assigned on a module and its submodules since this call."""
    before = {name: _snapshot(part) for name, part in module.named_modules()}

    def since() -> list[str]:
        found: list[str] = []
        for name, part in module.named_modules():
            now, then = _snapshot(part), before.get(name, {})
            keys = [key for key in {*now, *then} if key not in now or key not in then or now[key][1] != then[key][1]]
            found.extend(f"{name}.{key}".lstrip(".") for key in sorted(keys))
        return found

    return since


def _snapshot(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute, kept so that its id stays unique, and its comparison key."""
    return {key: (value, comparison_key(value)) for key, value in vars(part).items() if not key.startswith("_")}


def comparison_key(value: Any) -> Any:
    """Key that an attribute is compared by: plain values by value, others (configurations, functions) by identity."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(comparison_key(each) for each in value)
    if isinstance(value, dict):
        return dict, tuple((repr(key), comparison_key(each)) for key, each in value.items())
    return id(value)


def look_of(module: nn.Module, ignored: set[tuple[str, str]]) -> tuple[Any, ...]:
    """Classes, attributes, shapes and shared weights of a module and its submodules."""
    shared: dict[int, int] = {}
    return tuple(
        (
            path,
            type(part),
            tuple((name, comparison_key(v)) for name, v in sorted(vars(part).items())
                  if not name.startswith("_") and (path, name) not in ignored and name != "training"),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad, shared.setdefault(id(p), len(shared)))
                  for name, p in part._parameters.items() if p is not None),
            tuple((name, tuple(b.shape), b.dtype) for name, b in part.named_buffers(recurse=False)),
        )
        for path, part in module.named_modules()
    )  # fmt: skip


def indices_in(modules: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Attributes that hold the layer's index."""
    counting: set[tuple[str, str]] | None = None
    for at, module in enumerate(modules):
        mine = {(path, name) for path, part in module.named_modules() for name, v in vars(part).items()
                if type(v) is int and v == at}  # fmt: skip
        counting = mine if counting is None else counting & mine
    return counting or set()
