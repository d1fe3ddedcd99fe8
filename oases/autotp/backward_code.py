"""Python code of a model for its backward pass, which a graph of the forward pass does not hold.

An autograd function whose backward is the derivative of its forward (a GELU that saves memory, say) loses nothing:
that is found by running both on random numbers. Layers with others (straight-through estimators, scaled gradients),
or with hooks of activations, stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 1e-6
"""Relative; authors write constants with some eight digits."""


@contextmanager
def code_of_backward() -> Iterator[Callable[[], list[str]]]:
    """Watch this thread; yields a function that names what has code for the backward pass that a graph would lose."""
    calls: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
    hooks: list[str] = []
    thread = threading.get_ident()
    functions: Any = torch.autograd.function._SingleLevelFunction  # apply() of all goes on to that of its base
    register = Tensor.register_hook

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A custom operator's is called by the operator, which is a node of the graph.
        if threading.get_ident() == thread and not cls.__module__.startswith("torch._library"):
            described = tuple(_Described.of(each) if isinstance(each, Tensor) else each for each in args)
            calls[cls, repr(described)] = (cls, described)
        return super(functions, cls).apply(*args, **kwargs)

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        if threading.get_ident() == thread:
            hooks.append("Tensor.register_hook")
        return register(tensor, hook)

    def lost() -> list[str]:
        others = (
            f"the autograd function {cls.__name__}" for cls, args in calls.values() if not _is_derivative(cls, args)
        )
        return list(dict.fromkeys([*others, *hooks]))

    functions.apply, Tensor.register_hook = classmethod(apply), register_hook  # type: ignore[method-assign]
    try:
        yield lost
    finally:
        del functions.apply
        Tensor.register_hook = register  # type: ignore[method-assign]


class _Described:
    """Shape of a tensor in a traced call; dynamic dimensions have their traced length."""

    def __init__(self, shape: tuple[int, ...], floating: bool) -> None:
        self.shape, self.floating = shape, floating

    @classmethod
    def of(cls, tensor: Tensor) -> _Described:
        shape = tuple(length if isinstance(length, int) else length.node.hint for length in tensor.shape)
        return cls(shape, tensor.is_floating_point())

    def __repr__(self) -> str:
        return f"{self.shape} {self.floating}"

    def example(self, generator: torch.Generator) -> Tensor:
        if not self.floating:
            return torch.zeros(self.shape, dtype=torch.long)
        return torch.randn(self.shape, dtype=torch.float64, generator=generator).requires_grad_()


class _Context:
    """Context of a function's forward whose backward is not used."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("mark_", "set_", "save_")):
            return lambda *args: None
        raise AttributeError(name)


def _is_derivative(function: Any, described: tuple[Any, ...]) -> bool:
    """Whether a function's backward is the derivative of its forward, at random numbers."""

    def gradients(call: Callable[..., Any]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        args = [each.example(generator) if isinstance(each, _Described) else each for each in described]
        given = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
        with torch.enable_grad():
            found = call(*args)
        found = [found] if isinstance(found, Tensor) else list(found)
        found = [each for each in found if isinstance(each, Tensor) and each.requires_grad]
        weights = [torch.randn(each.shape, dtype=each.dtype, generator=generator) for each in found]
        made = torch.autograd.grad(found, given, weights, materialize_grads=True) if found else ()
        return [*(each.detach() for each in found), *made]

    own_context = torch.autograd.function._is_setup_context_defined(function.setup_context)
    try:
        theirs = gradients(function.apply)
        traced = gradients(function.forward if own_context else lambda *args: function.forward(_Context(), *args))
    except Exception:  # a model's code may raise anything, as on types other than its own: then it stays as it is
        return False
    return len(theirs) == len(traced) and all(
        bool((one - other).abs().max() <= _TOLERANCE * one.abs().max())
        for one, other in zip(theirs, traced, strict=True)
        if one.numel()
    )
