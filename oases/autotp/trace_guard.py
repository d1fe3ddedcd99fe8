"""Guard of a layer's trace: what a graph does not hold, and what changed since and is traced again or refused.

A trace notes which attributes it reads: of the layer's modules, their classes, the objects that they hold, such as
configurations, and globals. Traced again: training modes, plain values among these, and what classes hold. Refused:
hooks within the layer, other forwards and submodules, other objects among these, and Python code for the backward
pass. Weights, buffers and `requires_grad` may change; a graph reads them anew.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from oases.limits import short

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OURS = ("training", "tensor_parallel", "gradient_checkpointing", "forward")
MOST_VALUES = 16
"""Values of an attribute that a layer is traced for."""
_OF_MODULES = frozenset(name for name in vars(nn.Module()) if name.startswith("_"))
"""Private attributes that every module has."""
_TOLERANCE = 1e-6
"""Relative, of a backward pass; authors write constants with some eight digits."""


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
    found = [(part._forward_hooks, recorders(part)) for part in module.modules() if part._forward_hooks]
    for held, hooks in found:
        for number in hooks:
            del held[number]
    try:
        yield
    finally:
        for held, hooks in found:
            held.update(hooks)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def comparison_key(value: Any) -> Any:
    """Key that an attribute is compared by: plain values by value, others (configurations, functions) by identity."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(comparison_key(each) for each in value)
    if isinstance(value, dict):
        return dict, tuple((repr(key), comparison_key(each)) for key, each in value.items())
    return id(value)


def _attributes(part: nn.Module) -> dict[str, Any]:
    """Attributes besides those that every module has."""
    return {name: value for name, value in vars(part).items() if name not in _OF_MODULES}


Read = tuple[int | str, tuple[Any, ...]]
"""Attribute of a layer: number of the submodule in `layer.modules()`, and names or keys from there.

Or the name of a module of Python, and a global of it.
"""
Reads = Mapping[Read, Any]
"""Attributes that a trace read, with their values then."""


class _ABSENT:
    """Value of an attribute that is not there; a class, because a copy of a class is itself."""


_CONTAINERS = (dict, list, tuple)
_OPAQUE = frozenset(("torch", "oases", *sys.stdlib_module_names))
"""Packages whose objects have no attributes of the model's author."""


def _items(holder: Any) -> list[tuple[Any, Any]]:
    """Names and values of an object's attributes, or a container's keys and items."""
    if isinstance(holder, _CONTAINERS):
        return list(holder.items() if isinstance(holder, dict) else enumerate(holder))
    slots = [name for kind in type(holder).__mro__ for name, each in vars(kind).items()
             if isinstance(each, MemberDescriptorType) and name[:2] != "__" and hasattr(holder, name)]  # fmt: skip
    held = _attributes_of(holder).items()
    return [
        *(each for each in held if each[0] not in _OF_MODULES),
        *((name, getattr(holder, name)) for name in slots),
    ]


def _holders(holder: Any, seen: set[int], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """An object and the objects and containers that it holds, each once, with the way to it."""
    seen.add(id(holder))
    yield path, holder
    for name, each in _items(holder):
        known = isinstance(each, (*_CONTAINERS, SimpleNamespace, argparse.Namespace))
        foreign = _is_foreign(type(each).__module__) or isinstance(each, (nn.Module, Tensor, type))
        if id(each) not in seen and not _is_plain(each) and (known or not foreign):
            yield from _holders(each, seen, (*path, name))


def _holders_in(layer: nn.Module) -> Iterator[tuple[int, tuple[Any, ...], Any]]:
    """Holders of a layer's attributes: its submodules, numbered, and the objects that they hold."""
    seen = {id(part) for part in layer.modules()}
    for at, part in enumerate(layer.modules()):
        yield from ((at, *found) for found in _holders(part, seen))


def _value(holder: Any, path: Sequence[Any]) -> Any:
    """Value at the end of a path: of an object, else of its class as it stands there; _ABSENT for none."""
    for name in path:
        kind = type(holder)  # isinstance() would ask the object, which takes long for a configuration of transformers
        if issubclass(kind, _CONTAINERS):
            inside = name in holder if issubclass(kind, dict) else name < len(holder)
            holder = holder[name] if inside else _ABSENT
        elif name in (held := _attributes_of(holder)):
            holder = held[name]
        else:
            found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)
            holder = getattr(holder, name, _ABSENT) if isinstance(found, MemberDescriptorType) else found
    return holder


def _attributes_of(holder: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # it has slots
        return {}
    return found


def _same(one: Any, other: Any, *, deep: bool = True) -> bool:
    """Whether two values are equal, plain ones and containers by value. deep: with the items of containers."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return [*one] == [*other] and not (deep and not all(map(_same, one.values(), other.values())))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and not (deep and not all(map(_same, one, other)))
    return one == other if isinstance(one, (set, frozenset)) else isinstance(one, _PLAIN) and repr(one) == repr(other)


def values_of(layer: nn.Module) -> dict[Read, Any]:
    """Copies of the plain values that a layer's submodules, and the objects that they hold, have as attributes."""
    return {
        (at, (*path, name)): copy.deepcopy(value)
        for at, path, holder in _holders_in(layer) for name, value in _items(holder)
        if _is_plain(value) and name not in _OURS
    }  # fmt: skip


def set_values(layer: nn.Module, values: Reads) -> None:
    """Give a copy of a layer the plain values of another, see `values_of`."""
    parts = list(layer.modules())
    for (at, (*path, name)), value in values.items():
        holder = _value(parts[int(at)], path)
        if isinstance(holder, (dict, list)):
            holder[name] = copy.deepcopy(value)
        elif holder is not _ABSENT and not isinstance(holder, tuple):
            object.__setattr__(holder, name, copy.deepcopy(value))


@contextmanager
def noted_reads(layer: nn.Module) -> Iterator[Counter[Read]]:
    """Context that counts which attributes of a copy of a layer are read.

    The classes of what holds them are replaced by subclasses; where a class has none, all attributes count as read.
    """
    found = Counter[Read]()
    ways: dict[int, Read] = {}
    classes: dict[type, type] = {}

    def noting(kind: Any, slotted: bool) -> type:
        aliases, module = getattr(kind, "attribute_map", {}), issubclass(kind, nn.Module)

        def read(self: Any, name: str) -> Any:
            of_torch = name in _OF_MODULES or (module and hasattr(nn.Module, name))
            if not (of_torch or name.startswith("__") or name in _OURS):
                at, path = ways.get(id(self), (-1, ()))
                found[at, (*path, aliases.get(name, name))] += 1
            return kind.__getattribute__(self, name)

        body = {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), {**body, **({"__slots__": ()} if slotted else {})})

    replaced = []
    for at, path, holder in list(_holders_in(layer)):
        kind = type(holder)
        try:
            if kind not in classes:
                classes[kind] = noting(kind, not hasattr(holder, "__dict__"))
            object.__setattr__(holder, "__class__", classes[kind])
        except TypeError:  # a container, or a class that asks its subclasses for more
            found.update((at, (*path, name)) for name, _ in _items(holder))
        else:
            ways[id(holder)] = at, path
            replaced.append((holder, kind))
    try:
        yield found
    finally:
        for holder, kind in replaced:
            object.__setattr__(holder, "__class__", kind)


def read_values(layer: nn.Module, noted: Counter[Read]) -> dict[Read, Any]:
    """Values of what was read in `noted_reads`, and of the globals that the functions among it name."""
    parts = list(layer.modules())
    found: dict[Read, Any] = {
        (at, path): _value(parts[at], path)
        for (at, path), times in noted.items() if times > 0 and isinstance(at, int) and at >= 0
        if not any(path[0] in held for held in (parts[at]._parameters, parts[at]._buffers, parts[at]._modules))
    }  # fmt: skip
    seen: set[Any] = set()
    queue: list[Any] = [*(type(part).forward for part in parts), *found.values()]
    while queue:
        given = queue.pop()
        function = inspect.unwrap(getattr(given, "fget", None) or getattr(given, "__func__", given))
        if not isinstance(function, FunctionType) or function in seen or _is_foreign(function.__module__):
            continue
        seen.add(function)
        names, module = set(_names_in(function.__code__)), sys.modules.get(function.__module__)
        for path in [(name,) for name in names] + [(name, inner) for name in names for inner in names]:
            holder = _value(module, path[:-1])
            value = _ABSENT if path[1:] and (_is_plain(holder) or _of_foreign(holder)) else _value(holder, path[-1:])
            if _is_plain(value) or (isinstance(value, FunctionType) and not _of_foreign(value)):
                found[function.__module__, path] = copy.deepcopy(value)
                queue.append(value)
    return found


def _names_in(code: Any) -> Iterator[str]:
    """Names of globals and attributes in a function's code, and in that of functions inside of it."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for each in code.co_consts:
            yield from _names_in(each)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _OPAQUE


def _of_foreign(value: Any) -> bool:
    return _is_foreign(str(getattr(value, "__module__", getattr(value, "__name__", ""))))


class TraceGuard:
    """Check of a traced layer before each call. path: its name in the model."""

    def __init__(self, layer: nn.Module, path: str) -> None:
        self.layer, self._path = layer, path
        self._names = {part: name for name, part in layer.named_modules()}
        self._parts = list(self._names)
        self._fixed = [self._forwards_and_modules(part) for part in self._parts]
        self._begun: dict[Read, Any] = {
            (at, (*way, name)): copy.deepcopy(value) if _is_plain(value) else value
            for at, way, holder in _holders_in(layer) for name, value in _items(holder)
        }  # fmt: skip
        self._traced: dict[Read, list[Any]] = {}
        """Values of what was read, of each trace that this layer asked for."""

    def modes(self) -> tuple[bool, ...]:
        """Training mode of each submodule, after a check of the rest. RuntimeError where it has changed."""
        for part, fixed in zip(self._parts, self._fixed, strict=True):
            if part is not self.layer and _hooked(part):
                raise self._changed(part, "got hooks, which would not be called: add them")
            if (now := self._forwards_and_modules(part)) != fixed:
                if now[:2] != fixed[:2]:
                    raise self._changed(part, "got another forward: put it there")
                names = dict.fromkeys(name for name, _ in {*now[2]} ^ {*fixed[2]})
                raise self._changed(part, f"has another module {', '.join(names)} now: put it there")
        return tuple([part.training for part in self._parts])

    def _forwards_and_modules(self, part: nn.Module) -> list[Any]:
        """Forward of an object and of its class, and its modules; the layer's own forward runs its trace."""
        own = None if part is self.layer else part.__dict__.get("forward")
        return [own, type(part).forward, [*part._modules.items()]]

    def holds(self, reads: Reads) -> bool:
        """Whether the layer has the values that a trace read. RuntimeError for another object than at the start."""
        found = True
        for (at, path), traced in reads.items():
            value, begun = _value(self._root(at), path), self._begun.get((at, path), _ABSENT)
            if value is traced or (value is begun and type(value) not in _PLAIN):
                continue
            if _same(value, traced, deep=_is_plain(value)):  # else items are read by themselves
                continue
            if _is_plain(value) and (_is_plain(traced) or traced is _ABSENT):
                found = False
            elif not _same(value, begun):
                holder = _value(self._root(at), path[:-1])
                if isinstance(at, str):
                    found = False
                elif value is _ABSENT or isinstance(holder, _CONTAINERS) or path[-1] in _attributes_of(holder):
                    now = "none" if value is _ABSENT else f"another {type(value).__name__}"
                    name = ".".join(map(str, path))
                    raise self._changed(self._root(at), f"had {name} and has {now} now: set it")
                found = False
        return found

    def _root(self, at: int | str) -> Any:
        return sys.modules[at] if isinstance(at, str) else self._parts[at]

    def note(self, reads: Reads) -> None:
        """Note what a trace for this layer read. RuntimeError where there are too many of them."""
        for (at, path), value in reads.items():
            known = self._traced.setdefault((at, path), [])
            known += [] if any(_same(value, each) for each in known) else [value]
            if len(known) > MOST_VALUES:
                raise RuntimeError(
                    f"{self._where(self._root(at), path)} has had {len(known)} values, now {short(value)}, and the "
                    "layer is traced again for each; keep what changes in every step outside of the layer"
                )

    def changed(self) -> str:
        """Names of plain values that are others now than at the start."""
        now = values_of(self.layer)
        return ", ".join(sorted({str(path[-1]) for (at, path), value in now.items()
                                 if not _same(value, self._begun.get((at, path), _ABSENT))}))  # fmt: skip

    def _changed(self, part: nn.Module, what: str) -> RuntimeError:
        where = self._where(part) or "the model"
        return RuntimeError(f"{where} {what} before parallelize(), which traced the layer as it was then")

    def _where(self, part: nn.Module, path: Sequence[Any] = ()) -> str:
        own = (self._path, self._names[part]) if isinstance(part, nn.Module) else (part.__name__,)
        return ".".join(str(each) for each in (*own, *path) if each != "")


def assigned_attributes(module: nn.Module) -> Callable[[], list[str]]:
    """Function that returns the attributes assigned on a module and its submodules since this call."""

    paths = [path.split(".") if path else [] for path, _ in module.named_modules()]

    def look() -> dict[str, tuple[Any, Any]]:
        """Each attribute, kept so that its id stays unique, and its comparison key."""
        return {
            ".".join(map(str, (*paths[at], *path, name))): (value, comparison_key(value))
            for at, path, holder in _holders_in(module)
            for name, value in _items(holder)
        }

    before = look()

    def since() -> list[str]:
        now = look()
        return sorted(
            name for name in {*now, *before}
            if name not in now or name not in before or now[name][1] != before[name][1]
        )  # fmt: skip

    return since


def changed_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[str]]:
    """Function that returns the arguments whose lists, dicts and the like have got other items since this call."""
    given: dict[str, Any] = {**{f"argument {at}": each for at, each in enumerate(args)}, **kwargs}
    before = {name: pytree.tree_flatten(each) for name, each in given.items()}

    def since() -> list[str]:
        found = []
        for name, each in given.items():
            (now, tree), (then, was) = pytree.tree_flatten(each), before[name]
            if tree != was or any(one is not other for one, other in zip(now, then, strict=True)):
                found.append(f"items of {name}")
        return found

    return since


def attributes_of(module: nn.Module, ignored: Collection[str] = ()) -> tuple[Any, ...]:
    """Attributes of a module's own, private ones too, by name and key. ignored: names without their values."""
    return tuple(
        (name, None if name in ignored else comparison_key(value))
        for name, value in sorted(_attributes(module).items())
        if name != "training"
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


@contextmanager
def code_of_backward() -> Iterator[Callable[[], list[str]]]:
    """Watch this thread; yields a function that names what has code for the backward pass that a graph would lose.

    An autograd function whose backward is the derivative of its forward (a GELU that saves memory, say) loses
    nothing; others (straight-through estimators, scaled gradients) and hooks of activations do.
    """
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    hooks: list[str] = []
    thread = threading.get_ident()
    functions: Any = torch.autograd.function._SingleLevelFunction  # apply() of all goes on to that of its base
    register = Tensor.register_hook

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A custom operator's is called by the operator, which is a node of the graph.
        if threading.get_ident() == thread and not cls.__module__.startswith("torch._library"):
            given = tuple(_Given.of(each) if isinstance(each, Tensor) else each for each in args)
            calls[f"{id(cls)} {given}"] = cls, given
        return super(functions, cls).apply(*args, **kwargs)

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        if threading.get_ident() == thread:
            hooks.append("Tensor.register_hook")
        return register(tensor, hook)

    def lost() -> list[str]:
        others = [cls.__name__ for cls, given in calls.values() if not _is_derivative(cls, given)]
        return list(dict.fromkeys([*(f"the autograd function {name}" for name in others), *hooks]))

    functions.apply, Tensor.register_hook = classmethod(apply), register_hook  # type: ignore[method-assign]
    try:
        yield lost
    finally:
        del functions.apply
        Tensor.register_hook = register  # type: ignore[method-assign]


class _Given(NamedTuple):
    """Tensor of a traced call; dynamic dimensions have their traced length."""

    shape: tuple[int, ...]
    floating: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Given:
        lengths = (length if isinstance(length, int) else length.node.hint for length in tensor.shape)
        return cls(tuple(lengths), tensor.is_floating_point())


def _is_derivative(function: Any, given: tuple[Any, ...]) -> bool:
    """Whether a function's backward is the derivative of its forward, at random numbers."""

    def results(call: Callable[..., Any]) -> list[Tensor]:
        """Results and gradients."""
        generator = torch.Generator().manual_seed(0)

        def random(shape: Sequence[int]) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator)

        args = [
            each if not isinstance(each, _Given)
            else random(each.shape).requires_grad_() if each.floating
            else torch.zeros(each.shape, dtype=torch.long)
            for each in given
        ]  # fmt: skip
        with torch.enable_grad():
            found = pytree.tree_leaves(call(*args))
        found = [each for each in found if isinstance(each, Tensor) and each.requires_grad]
        of = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
        weights = [random(each.shape).to(each.dtype) for each in found]
        return [*found, *(torch.autograd.grad(found, of, weights, materialize_grads=True) if found else ())]

    def traced(*args: Any) -> Any:
        apart = torch.autograd.function._is_setup_context_defined(function.setup_context)
        return function.forward(*args) if apart else function.forward(FunctionCtx(), *args)

    try:
        pairs = list(zip(results(function.apply), results(traced), strict=True))
    except Exception:  # a model's code may raise anything, as on types other than its own: then it stays as it is
        return False
    return all(bool((one - other).abs().max() <= _TOLERANCE * one.abs().max()) for one, other in pairs if one.numel())
