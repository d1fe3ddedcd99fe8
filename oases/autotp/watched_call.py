"""Call of a layer while it is traced: the values that it changes, and the bound on its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from oases.autotp.cache import call_layer
from oases.autotp.module_snapshot import assigned_attributes

MOST_CALLS = 2000
"""Calls of torch's functions in a layer; the trace of a layer with more is given up.

Layers of XLNet, Llama, DeepSeek-V3 and Qwen3-Next have 31, 61, 124 and 200, whose traces took 1.2, 1.0, 0.5 and 2.1 s
of CPU time, and 2.4, 1.2, 2.8 and 6.9 where lengths vary: at 20 to 80 ms a call, 2000 take a minute or two. Layers
with more have loops over tokens or chunks, which a trace unrolls. A number of calls, unlike a time, is equal on all
ranks.
"""


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


class CallCounter(TorchFunctionMode):
    """Counts the calls of torch's functions; RuntimeError for each after the first MOST_CALLS."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.most = 0, MOST_CALLS

    @property
    def over(self) -> bool:
        """Whether there were too many."""
        return self.calls > self.most

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the call and run it. Reading an attribute (`shape`) is no call."""
        self.calls += getattr(function, "__name__", "") != "__get__"
        if self.over:
            raise RuntimeError(f"more than {self.most} calls of torch's functions")
        return function(*args, **(kwargs or {}))


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
