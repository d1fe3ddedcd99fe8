"""What the layers of a model do in one run without data: their ops, and who else reads weights and results of theirs.

The run costs what one forward pass without data costs, so every layer is looked at, not one of each class.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

Ops = tuple[str, ...]
"""The ops of one call of a layer, in order: what each is called with, tensors by the place where they came from."""


class Recorder(TorchDispatchMode):
    """Notes every op while a model runs.

    layers: the modules that are called one after the other. vocabulary: tables and heads. Both are watched: `ops` are
    those of each layer's calls; `strangers` the names of parameters that are read outside of the layer, table or head
    that holds them; `read` the calls of layers whose first result was read outside of layers, by their number.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], vocabulary: Iterable[nn.Module]) -> None:
        super().__init__()
        self.ops: list[Ops] = []
        self.strangers: set[str] = set()
        self.read: set[int] = set()
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._inside: list[nn.Module] = []
        self._running: list[str] = []
        self._places: dict[int, str] = {}
        self._kept: list[Any] = []  # ids stay those of one tensor as long as it is kept
        self._results: dict[int, int] = {}
        self._layers = list(dict.fromkeys(layers))
        self._users: dict[int, set[int]] = {}
        for module in {*self._layers, *vocabulary}:
            for parameter in module.parameters():
                self._users.setdefault(id(parameter), set()).add(id(module))
        self._modules = list({*self._layers, *vocabulary})
        parts = {id(part) for module in self._modules for part in module.modules()}
        for part in model.modules():  # another module has it, and may read it in another mode
            for held in [] if id(part) in parts else part.parameters(recurse=False):
                if id(held) in self._users:
                    self.strangers.update(self._names[id(held)])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Where the model runs."""
        handles = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, prepend=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(module)
        if module in self._layers:
            self._running, self._places = [], {}
            named: list[tuple[str, Mapping[str, Tensor]]] = [
                ("parameter", dict(module.named_parameters())),
                ("buffer", dict(module.named_buffers())),
            ]
            for kind, tensors in named:
                for name, tensor in tensors.items():
                    self._places.setdefault(id(tensor), f"{kind} {name}")

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside.pop()
        if module in self._layers:
            flat = pytree.tree_leaves(result)
            if flat and isinstance(flat[0], Tensor):
                self._results[id(flat[0])] = len(self.ops)
                self._kept.append(flat[0])
            self._running.append(f"-> {[self._placed(each) for each in flat]}")
            self.ops.append(tuple(self._running))

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the op and run it."""
        kwargs = kwargs or {}
        flat, _ = pytree.tree_flatten((args, kwargs))
        for tensor in (each for each in flat if isinstance(each, Tensor)):
            users = self._users.get(id(tensor))
            if users is not None and not any(id(module) in users for module in self._inside):
                self.strangers.update(self._names[id(tensor)])
            if id(tensor) in self._results and not self._inside:
                self.read.add(self._results[id(tensor)])
        result = func(*args, **kwargs)
        if any(module in self._layers for module in self._inside):
            self._running.append(f"{func} {[self._placed(each) for each in flat]}")
            for each in pytree.tree_leaves(result):
                self._placed(each)
        return result

    def _placed(self, value: Any) -> str:
        """What stands for a value in a layer's ops."""
        if not isinstance(value, Tensor):
            return repr(value)
        if id(value) not in self._places:
            self._kept.append(value)
            shape = f"{tuple(value.shape)} {value.dtype}"
            self._places[id(value)] = f"{len(self._places)} {shape} {_content(value)}".rstrip()
        return self._places[id(value)]


def _content(value: Tensor) -> str:
    """A constant's, so that layers with other ones differ; "" of what has no data."""
    if isinstance(value, FakeTensor) and value.constant is not None:
        value = value.constant
    if isinstance(value, FakeTensor) and value.constant is not None:
        value = value.constant
    if isinstance(value, FakeTensor) or value.is_meta or value.is_complex() or type(value) is not Tensor:
        return ""
    with torch.utils._python_dispatch._disable_current_modes():
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
