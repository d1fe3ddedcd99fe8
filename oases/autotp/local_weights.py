"""Hooks by which modules outside of stacks read local tensors, while their parameters are DTensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from oases.autotp.runner import LayerForward, StandaloneForward
from oases.core.execution.dtensors import is_dtensor, read

FORWARDS = (LayerForward, StandaloneForward)
"""Forwards of layers that run as graphs."""


class LocalWeights:
    """Local tensors in the places of modules' parameters, between `put` and `put_back`.

    replicated: of parameters alone that every rank holds whole: who reads them gets the whole tensor either way.
    """

    def __init__(self, modules: Sequence[nn.Module], *, replicated: bool = False) -> None:
        self._modules, self._replicated = list(modules), replicated
        self._kept: list[list[tuple[dict[str, Any], str, Tensor]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalWeights:
        """Return those of a copied model."""
        made = LocalWeights((), replicated=self._replicated)
        memo[id(self)] = made
        made._modules = copy.deepcopy(self._modules, memo)
        return made

    def put(self, *_: Any) -> None:
        """Put local tensors in the places, one for each parameter."""
        kept, seen = [], dict[int, Tensor]()
        for module in self._modules:
            held: dict[str, Any] = module._parameters
            for name, parameter in held.items():
                if is_dtensor(parameter) and not (self._replicated and _is_cut(parameter)):
                    if id(parameter) not in seen:
                        # A module that does not know of the cut, because it got the weight later, computes with all.
                        known = not _is_cut(parameter) or name in getattr(module, "shard_dims", ())
                        seen[id(parameter)] = read(parameter) if known else parameter.full_tensor()
                    kept.append((held, name, parameter))
                    held[name] = seen[id(parameter)]
        self._kept.append(kept)

    def put_back(self, *_: Any) -> None:
        """Restore the parameters."""
        for held, name, parameter in self._kept.pop() if self._kept else ():
            held[name] = parameter


def _is_cut(parameter: Any) -> bool:
    return not all(each.is_replicate() for each in parameter.placements)


def read_locally(model: nn.Module) -> LocalWeights:
    """Have modules outside of stacks read local tensors in their own forward pass.

    Not the model as a whole: whoever reads the parameter of a module without calling it, such as a fused head, would
    take a shard for the whole. Returns what the model's forward pass puts: parameters that every rank holds whole.
    """
    modules = list(_outside(model))
    for module in modules:
        own = LocalWeights([module])
        module.register_forward_pre_hook(own.put)
        module.register_forward_hook(own.put_back, always_call=True)
    return LocalWeights(modules, replicated=True)


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that hold parameters, but those of layers that run as graphs."""
    if isinstance(vars(module).get("forward"), FORWARDS):
        return
    if any(each is not None for each in module._parameters.values()):
        yield module
    for child in module.children():
        yield from _outside(child)
