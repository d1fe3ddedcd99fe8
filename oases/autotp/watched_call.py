"""Call of a layer while it is traced, and the values that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import nn

from oases.autotp.cache import call_layer
from oases.autotp.module_snapshot import assigned_attributes
from oases.graph.trace.as_run import CallCounter


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


class WatchedCall(nn.Module):
    """A layer called with its arguments as two trees, whose order export keeps.

    changed: gets the names of the attributes and arguments that the call changes; export puts attributes back.
    """

    def __init__(self, layer: nn.Module, changed: list[str], counter: CallCounter) -> None:
        super().__init__()
        self.layer = layer
        self.changed = changed
        self.counter = counter

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of the layer."""
        return call_layer(self._watched, args, kwargs)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        assigned, changed = assigned_attributes(self.layer), changed_arguments(args, kwargs)
        with self.counter:
            result = self.layer(*args, **kwargs)
        self.changed.extend([*assigned(), *changed()])
        return result
