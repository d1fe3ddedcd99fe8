"""Detect changes of a layer since it was traced; a graph does not follow later changes of its modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oases.limits import short

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_WATCHED = (int, float, str, bool, type(None), torch.dtype, Tensor)
MOST_VALUES = 16
"""Values of an attribute that a layer is traced for."""
_OF_MODULES = frozenset(name for name in vars(nn.Module()) if name.startswith("_"))
"""Private attributes that every module has."""


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


@dataclass(frozen=True)
class State:
    """Attribute of a submodule that has another value than when the layer was traced.

    part: index of the submodule in `layer.modules()`. key: of the value, which it is compared by.
    """

    part: int
    name: str
    key: Any
    value: Any = field(compare=False, repr=False)


class Modes(NamedTuple):
    """Training mode of each submodule of a layer, and its attributes that differ from those it was traced with."""

    training: tuple[bool, ...] = ()
    states: tuple[State, ...] = ()


States = Sequence[Mapping[str, Any]]
"""Values of the attributes of each submodule that may change between calls, see `states_of`."""


def states_of(layer: nn.Module) -> States:
    """Copies of each submodule's private attributes with plain values, and of its lists, dicts and the like of them.

    These may change between calls, as peft's `_disable_adapters` and `scaling` do: other values are another graph.
    """
    return [
        {name: copy.deepcopy(value) for name, value in vars(part).items() if _is_state(name, value)}
        for part in layer.modules()
    ]


def _is_state(name: str, value: Any) -> bool:
    may_change = name.startswith("_") or isinstance(value, (list, tuple, set, dict))
    return may_change and name not in _OF_MODULES and _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def modes_of(layer: nn.Module, traced: States) -> Modes:
    """Modes of a layer. traced: states of the copy that was traced."""
    parts = list(layer.modules())
    return Modes(
        tuple(part.training for part in parts),
        tuple(
            State(at, name, comparison_key(held[name]), copy.deepcopy(held[name]))
            for at, (part, values) in enumerate(zip(parts, traced, strict=True))
            for held in [vars(part)]
            for name, value in values.items()
            if name in held and _is_plain(held[name]) and comparison_key(held[name]) != comparison_key(value)
        ),
    )


def set_modes(layer: nn.Module, modes: Modes, traced: States) -> None:
    """Set the training mode and the states of each submodule, as `modes_of` returned them."""
    for part, training, values in zip(layer.modules(), modes.training, traced, strict=True):
        part.training = training
        vars(part).update(copy.deepcopy(dict(values)))
    parts = list(layer.modules()) if modes.states else []
    for state in modes.states:
        vars(parts[state.part])[state.name] = copy.deepcopy(state.value)


def activate_adapters(twin: nn.Module) -> None:
    """Activate all LoRA pairs of a copy that will be traced, so that those that are inactive now are sharded, too."""
    for part in twin.modules():
        pairs, held = part._modules.get("lora_A"), vars(part)
        if not isinstance(pairs, nn.ModuleDict) or not pairs or "_active_adapter" not in held:
            continue
        active = held["_active_adapter"]
        if set([active] if isinstance(active, str) else active) != set(pairs):
            part._active_adapter = list(pairs)  # type: ignore[assignment]
        part._disable_adapters, part.merged_adapters = False, []  # type: ignore[assignment]


class ModuleSnapshot:
    """State of a traced layer. path: its name in the model. traced: states of the copy that was traced.

    Weights, buffers, `requires_grad`, train() and eval() of any submodule, and states may change; hooks within the
    layer, other attributes that a forward may read, and forward methods may not.
    """

    def __init__(self, layer: nn.Module, path: str, traced: States) -> None:
        self._path = path
        self._parts = [(name, part, _attributes(part)) for name, part in layer.named_modules() if part is not layer]
        self._forwards = [vars(part).get("forward") for _, part, _ in self._parts]
        self._layer, self._own = layer, _attributes(layer)
        self._all = list(layer.modules())
        self._traced = traced
        self._watched = [
            (part, name)
            for part, values in zip(self._all, traced, strict=True)
            for name in values
            if _is_plain(vars(part).get(name, self))
        ]
        self._seen: list[Any] = []
        self._states: tuple[State, ...] = ()
        self._values: dict[tuple[int, str], set[Any]] = {}
        """Values that each state has had besides the traced one: each is traced."""

    def modes(self) -> Modes:
        """Modes of the layer, after the check. RuntimeError where it has changed otherwise."""
        for (name, part, attributes), forward in zip(self._parts, self._forwards, strict=True):
            if _hooked(part):
                raise RuntimeError(self._changed(name, "got hooks, which would not be called: add them"))
            if vars(part).get("forward") is not forward:
                raise RuntimeError(self._changed(name, "got another forward: put it there"))
            self._check(name, part, attributes)
        self._check("", self._layer, self._own)
        # Most calls compare alone: a step calls this for every layer.
        if [part.__dict__.get(name, self) for part, name in self._watched] != self._seen:
            self._see()
        return Modes(tuple([part.training for part in self._all]), self._states)

    def _see(self) -> None:
        """Take over states that have changed since the last call. RuntimeError where a value is no plain one."""
        names = {part: name for name, part in self._layer.named_modules()}
        values = [vars(part).get(name, self) for part, name in self._watched]
        for (part, name), value in zip(self._watched, values, strict=True):
            if not _is_plain(value):
                found = "none" if value is self else f"a {type(value).__name__} of other values than plain ones"
                raise RuntimeError(self._changed(names[part], f"had a plain {name} and has {found} now: set it"))
        self._states = modes_of(self._layer, self._traced).states
        self._seen = copy.deepcopy(values)
        for state in self._states:
            known = self._values.setdefault((state.part, state.name), set())
            known.add(state.key)
            if len(known) > MOST_VALUES:
                where = ".".join(each for each in (self._path, names[self._all[state.part]], state.name) if each)
                raise RuntimeError(
                    f"{where} has had {len(known)} values, now {short(state.value)}, and the layer is traced again "
                    "for each; keep what changes in every step outside of the layer"
                )

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
    return {key: (value, comparison_key(value)) for key, value in vars(part).items() if key not in _OF_MODULES}


def comparison_key(value: Any) -> Any:
    """Key that an attribute is compared by: plain values by value, others (configurations, functions) by identity."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(comparison_key(each) for each in value)
    if isinstance(value, dict):
        return dict, tuple((repr(key), comparison_key(each)) for key, each in value.items())
    return id(value)


def attributes_of(module: nn.Module, ignored: Collection[str] = ()) -> tuple[Any, ...]:
    """Attributes of a module's own, private ones too, by name and key. ignored: names without their values."""
    return tuple(
        (name, None if name in ignored else comparison_key(value))
        for name, value in sorted(vars(module).items())
        if name not in _OF_MODULES and name != "training"
    )


def look_of(module: nn.Module, ignored: set[tuple[str, str]]) -> tuple[Any, ...]:
    """Classes, attributes, shapes and shared weights of a module and its submodules."""
    shared: dict[int, int] = {}
    return tuple(
        (
            path,
            type(part),
            attributes_of(part, {name for at, name in ignored if at == path}),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad, shared.setdefault(id(p), len(shared)))
                  for name, p in part._parameters.items() if p is not None),
            tuple((name, tuple(b.shape), b.dtype) for name, b in part.named_buffers(recurse=False)),
        )
        for path, part in module.named_modules()
    )  # fmt: skip


def indices_in(modules: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Attributes that hold the layer's index in every layer that has them, which may be those of one kind alone."""
    counting: dict[tuple[str, str], bool] = {}
    for at, module in enumerate(modules):
        for path, part in module.named_modules():
            for name, value in vars(part).items():
                counting[path, name] = counting.get((path, name), True) and type(value) is int and value == at
    return {key for key, counts in counting.items() if counts}
