"""Hooks of parameters, deferred until the gradients are those of the whole step.

In one process a hook that changes a gradient, or steps an optimizer with it, sees that of the whole batch. Autograd
would call it before gradients are averaged, or for each micro-batch, and replicas would go apart. Of passes in
`no_sync()` a hook sees the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn


class _Deferred:
    """Hook of a parameter that is not called while others wait."""

    def __init__(self, others: DeferredHooks, hook: Callable[[Tensor], Any]) -> None:
        self._others, self._hook = others, hook

    def __call__(self, tensor: Tensor) -> Any:
        self._others.arrived(tensor)
        return None if self._others.wait else self._hook(tensor)


class DeferredHooks:
    """Hooks of parameters of one module. arrived: called with gradients that have hooks, before they are added."""

    def __init__(self, arrived: Callable[[Tensor], Any]) -> None:
        self.arrived = arrived
        self.wait = self._accumulated = False
        self._taken: dict[nn.Parameter, Any] = {}
        self._before: dict[nn.Parameter, Tensor | None] = {}

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Defer the hooks that parameters have now, each in its place, from which its handle still removes it."""
        for parameter in parameters:
            for held in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                hooks: dict[int, Any] = held or {}
                for number, hook in hooks.items():
                    owner = getattr(hook, "func", hook)  # of a partial
                    if not str(getattr(owner, "__module__", "")).startswith("oases."):
                        hooks[number] = _Deferred(self, hook)
                        if parameter not in self._taken:  # of hooks after the sum, too, it is to be told before
                            self._taken[parameter] = parameter.register_hook(self._arrive)

    def _arrive(self, gradient: Tensor) -> None:
        self.arrived(gradient)

    def accumulate(self) -> None:
        """Let hooks wait during a pass whose gradients are those of this rank alone."""
        self.wait = self._accumulated = True

    def begin(self, others: Iterable[nn.Parameter] = ()) -> None:
        """Let hooks wait, and put the gradients of before aside, unless they are to be averaged with those to come.

        others: further parameters, without hooks.
        """
        self.wait = True
        self._before = {each: None if self._accumulated else each.grad for each in (*self._taken, *others)}
        for parameter in () if self._accumulated else self._before:
            parameter.grad = None

    def end(self) -> None:
        """Add the gradients since `begin` to those of before, by way of the hooks."""
        self.wait = self._accumulated = False
        before, self._before = self._before, {}
        for parameter, gradient in before.items():
            new, parameter.grad = parameter.grad, gradient
            if new is not None:
                add_gradient(parameter, new)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to a parameter's as autograd does, by way of its hooks."""
    for hook in [*(parameter._backward_hooks or {}).values()]:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    for hook in [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]:
        hook(parameter)
