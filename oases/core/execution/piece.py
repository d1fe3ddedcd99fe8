"""Pieces: parts of the autograd graph, detached at the ops of a schedule, and the parameters that they read.

A piece is one call of a function with a graph of its own: `input` and `output` detach it, `backward` runs it when its
gradients have arrived. It holds graph edges and no tensor, so memory is freed as soon as no graph and no later op
needs it. Pieces read parameters through stand-ins (detached, sharing memory): gradient hooks of the parameters fire
once per step in the outer graph, not once per sub-batch in here.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oases.errors import UsageError
from oases.extension import DeferredGradients, Leaves, Piece

__all__ = [
    "BlockParameters", "DeferredGradients", "Leaves", "Piece", "method_of", "outside_of_dynamo", "read_only",
    "recorded", "require_compiler",
]  # fmt: skip

_F = TypeVar("_F", bound=Callable[..., Any])

deferring: ContextVar[DeferredGradients | None] = ContextVar("oases_deferring", default=None)
"""Where linears of the current forward pass record weight gradients; a context variable, to cross user modules."""
in_piece = [False]
"""Whether a compiled block is called by a piece that defers; torch.compile guards on it."""
_of_compiled: list[type[DeferredGradients]] = [DeferredGradients]

# By block: its methods, compiled with the block's options.
_compiled_methods: WeakKeyDictionary[nn.Module, dict[str, Callable[..., Tensor]]] = WeakKeyDictionary()


def defer_compiled_by(kind: type[DeferredGradients]) -> None:
    """Have pieces of compiled blocks record weight gradients in objects of `kind`."""
    _of_compiled[:] = [kind]


def deferral(leaves: Leaves, *, compiled: bool) -> DeferredGradients:
    """Weight gradients that a piece of a block, compiled or not, defers."""
    return (_of_compiled[0] if compiled else DeferredGradients)(leaves)


def require_compiler(name: str | None) -> None:
    """Raise UsageError unless `name` is None or a backend of torch.compile."""
    if name is not None and name not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UsageError(f"unknown compile {name!r}; known are none, {known}, and torch's for debugging")


def method_of(block: nn.Module, name: str) -> Callable[..., Any]:
    """Method of a block, compiled if the block was given to `torch.compile`.

    ValueError for a block compiled in place by `.compile()`: that compiles forward(), which a stack never calls.
    """
    if block._compiled_call_impl is not None:
        raise ValueError(
            f"a block ({type(block).__name__}) was compiled by .compile(), which compiles forward() alone; give the "
            "stack torch.compile(block) instead, whose partial() and combine() are then compiled"
        )
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # where it is not loaded, nothing is compiled
    if dynamo is None or not isinstance(block, dynamo.OptimizedModule):
        found: Callable[..., Any] = getattr(block, name)
        return found
    compiled: Any = block
    methods = _compiled_methods.setdefault(block, {})
    if name not in methods:
        methods[name] = compiled.dynamo_ctx(getattr(compiled._orig_mod, name))
    return methods[name]


def recorded(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], values: Sequence[Any], leaves: list[Leaves],
    *, whole: bool = False, overwritten: bool = False, begun: Callable[[Piece], None] | None = None,
) -> tuple[Tensor, Piece]:  # fmt: skip
    """Call `function(*inputs, *values)` as a piece; return its detached result and the piece.

    begun: called with the piece before the function, which may record further inputs and, before its result, outputs.
    """
    piece = Piece(leaves, whole)
    inputs = [*map(piece.input, inputs)]
    if begun is not None:
        begun(piece)
    result = tensor_of(function, *inputs, *values)
    if overwritten:
        result = own_memory(result, (*inputs, *values))
    return piece.output(result, overwritten), piece


def tensor_of(method: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Result of a block's method. TypeError for anything but a tensor."""
    result = method(*arguments)
    if not isinstance(result, Tensor):
        name = getattr(method, "__qualname__", repr(method))
        raise TypeError(f"{name}() of a block returned {result!r:.80}; have it return a tensor")
    return result


def read_only(method: Callable[..., Tensor], arguments: Sequence[Any], call: Callable[[], Tensor]) -> Tensor:
    """Result of a call of a block's method whose arguments are read again. RuntimeError where it changes them."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    before = [each._version for each in tensors]
    result = call()
    if [each._version for each in tensors] != before:
        name = getattr(method, "__qualname__", repr(method))
        raise RuntimeError(
            f"{name}() of a block changes its input in place, and recomputation would read the new values; change a "
            "copy, or leave out recompute"
        )
    return result


def outside_of_dynamo(function: _F) -> _F:
    """Decorator of a function that torch.compile leaves as it is, with all that it calls.

    torch.compiler.disable imports Dynamo, which takes seconds; where it is not loaded, nothing is compiled.
    """
    disabled: list[Any] = []

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*arguments, **options)

    return cast(_F, call)


def own_memory(result: Tensor, others: Sequence[Any]) -> Tensor:
    """`result`, or a copy where it shares memory with one of `others` or is a leaf, so that it can be overwritten."""
    shared = result.is_leaf and result.requires_grad
    for other in others:
        shared = shared or (isinstance(other, Tensor) and torch._C._is_alias_of(result, other))  # type: ignore[attr-defined]
    return result.clone() if shared else result


class BlockParameters:
    """Parameters of a block, and the places in its modules that hold them.

    names: within the block, as in `named_parameters`. trained: indices of those that require gradients.
    """

    def __init__(self, block: nn.Module) -> None:
        plain: nn.Module = getattr(block, "_orig_mod", block)
        self.names = [name for name, _ in plain.named_parameters()]
        self.parameters: list[Tensor] = list(plain.parameters())
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        modules = list(plain.modules())
        # All places, also of parameters that modules share.
        self._places = [
            (module._parameters, key, numbers[id(parameter)])
            for module in modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._children = [(m._modules, key, child) for m in modules for key, child in m._modules.items()]
        self._sizes = [(held, len(held)) for m in modules for held in (m._parameters, m._modules)]
        self._trains = [parameter.requires_grad for parameter in self.parameters]
        self.trained = [number for number, trains in enumerate(self._trains) if trains]
        named = "\n".join(self.names[number] for number in self.trained)
        self.form = (len(self.trained), f"{zlib.crc32(named.encode()):08x}")
        """Number of trained parameters, and a digest of their names."""

    def trained_places(self) -> Iterator[tuple[tuple[int, str], str]]:
        """Places of the trained parameters, comparable between blocks, and their names."""
        for held, key, number in self._places:
            if self._trains[number]:
                yield (id(held), key), self.names[number]

    @property
    def current(self) -> bool:
        """Whether the block still holds these parameters in these places."""
        parameters, trains = self.parameters, self._trains
        for held, key, number in self._places:
            parameter = held.get(key)
            if parameter is not parameters[number] or parameter.requires_grad is not trains[number]:
                return False
        for children, key, child in self._children:
            if children.get(key) is not child:
                return False
        return all(len(held) == size for held, size in self._sizes)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Replace the block's parameters by these tensors, by index."""
        for held, key, number in self._places:
            held[key] = tensors[number]  # type: ignore[assignment]

    def put_back(self, others: Collection[str] = ()) -> None:
        """Restore the parameters. others: names of parameters that are restored elsewhere."""
        for held, key, number in self._places:
            if not others or self.names[number] not in others:
                held[key] = self.parameters[number]  # type: ignore[assignment]

    def whole(self, by_name: Mapping[str, nn.Parameter] | None) -> list[Tensor]:
        """The parameters, with the gathered ones, by name, in place of sharded ones."""
        if by_name is None:
            return self.parameters
        return [by_name.get(name, own) for name, own in zip(self.names, self.parameters, strict=True)]
