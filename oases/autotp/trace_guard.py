"""Guard of a layer's trace: what a graph does not hold, and what changed since and is traced again or refused.

Traced again: training modes, and attributes with plain values. Refused: hooks within the layer, other forwards and
submodules, other tensors as attributes, and Python code for the backward pass. Weights, buffers and `requires_grad`
may change; a graph reads them anew.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
"""Plain attributes of each submodule, see `states_of`."""


def states_of(layer: nn.Module) -> States:
    """Copies of each submodule's attributes with plain values; other values are another graph."""
    return [
        {name: copy.deepcopy(value) for name, value in _attributes(part).items()
         if name not in _OURS and _is_plain(value)}
        for part in layer.modules()
    ]  # fmt: skip


def set_modes(layer: nn.Module, modes: Modes, traced: States) -> None:
    """Set the training mode and the states of each submodule, as `TraceGuard.modes` returned them."""
    parts = list(layer.modules())
    for part, training, values in zip(parts, modes.training, traced, strict=True):
        part.training = training
        vars(part).update(copy.deepcopy(dict(values)))
    for state in modes.states:
        vars(parts[state.part])[state.name] = copy.deepcopy(state.value)


class TraceGuard:
    """Check of a traced layer before each call. path: its name in the model. traced: states of the traced copy."""

    def __init__(self, layer: nn.Module, path: str, traced: States) -> None:
        self._layer, self._path = layer, path
        self._names = {part: name for name, part in layer.named_modules()}
        self._parts = list(self._names)
        self._fixed = [self._forwards_and_modules(part) for part in self._parts]
        self._tensors = [(part, name, value) for part in self._parts for name, value in _attributes(part).items()
                         if isinstance(value, Tensor)]  # fmt: skip
        # The copy has all adapters active. So what may differ between the two (private attributes, as peft's
        # `_disable_adapters`, and collections, as its `scaling`) is compared with the copy's, and others, of which
        # one may be the layer's index, with the layer's own.
        self._watched = [
            (at, part, name, comparison_key(
                value if name.startswith("_") or isinstance(value, (list, tuple, set, dict)) else vars(part)[name]
            ))
            for at, (part, values) in enumerate(zip(self._parts, traced, strict=True))
            for name, value in values.items() if _is_plain(vars(part).get(name, layer))
        ]  # fmt: skip
        self._seen: list[Any] = []
        self._states: tuple[State, ...] = ()
        self._values: dict[tuple[int, str], set[Any]] = {}
        """Values that each state has had besides the traced one: each is traced."""

    def modes(self) -> Modes:
        """Modes of the layer, after the check. RuntimeError where it has changed otherwise."""
        for part, fixed in zip(self._parts, self._fixed, strict=True):
            if part is not self._layer and _hooked(part):
                raise self._changed(part, "got hooks, which would not be called: add them")
            if (now := self._forwards_and_modules(part)) != fixed:
                if now[:2] != fixed[:2]:
                    raise self._changed(part, "got another forward: put it there")
                names = dict.fromkeys(name for name, _ in {*now[2]} ^ {*fixed[2]})
                raise self._changed(part, f"has another module {', '.join(names)} now: put it there")
        for part, name, tensor in self._tensors:
            if part.__dict__.get(name) is not tensor:
                raise self._changed(part, f"had {name} and has another tensor now: set it")
        # Most calls compare alone: a step calls this for every layer.
        values = [part.__dict__.get(name, self) for _, part, name, _ in self._watched]
        if values != self._seen:
            self._see(values)
        return Modes(tuple([part.training for part in self._parts]), self._states)

    def _forwards_and_modules(self, part: nn.Module) -> list[Any]:
        """Forward of an object and of its class, and its modules; the layer's own forward runs its trace."""
        own = None if part is self._layer else part.__dict__.get("forward")
        return [own, type(part).forward, [*part._modules.items()]]

    def _see(self, values: list[Any]) -> None:
        """Take over states that have changed since the last call. RuntimeError where a value is no plain one."""
        states: list[State] = []
        for (at, part, name, traced), value in zip(self._watched, values, strict=True):
            if not _is_plain(value):
                found = "none" if value is self else f"a {type(value).__name__} of other values than plain ones"
                raise self._changed(part, f"had a plain {name} and has {found} now: set it")
            if (key := comparison_key(value)) != traced:
                states.append(State(at, name, key, copy.deepcopy(value)))
        self._states, self._seen = tuple(states), copy.deepcopy(values)
        for state in states:
            known = self._values.setdefault((state.part, state.name), set())
            known.add(state.key)
            if len(known) > MOST_VALUES:
                raise RuntimeError(
                    f"{self._where(self._parts[state.part], state.name)} has had {len(known)} values, now "
                    f"{short(state.value)}, and the layer is traced again for each; keep what changes in every step "
                    "outside of the layer"
                )

    def _changed(self, part: nn.Module, what: str) -> RuntimeError:
        where = self._where(part) or "the model"
        return RuntimeError(f"{where} {what} before parallelize(), which traced the layer as it was then")

    def _where(self, part: nn.Module, name: str = "") -> str:
        return ".".join(each for each in (self._path, self._names[part], name) if each)


def assigned_attributes(module: nn.Module) -> Callable[[], list[str]]:
    """Function that returns the attributes assigned on a module and its submodules since this call."""

    def look() -> dict[str, tuple[Any, Any]]:
        """Each attribute, kept so that its id stays unique, and its comparison key."""
        return {
            f"{path}.{name}".lstrip("."): (value, comparison_key(value))
            for path, part in module.named_modules()
            for name, value in _attributes(part).items()
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
