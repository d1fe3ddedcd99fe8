"""Sharding rule of expert modules: each rank computes its own experts for the tokens that all ranks hold.

Every rank runs the model's router on the same values, so all ranks agree on the routing, and runs the tokens of its
own experts. The result is a partial sum, as of a row-parallel linear: the layer is cut at its all-reduce, which other
sub-batches overlap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from oases.autotp.experts import ACTIVATIONS, ExpertCollection, original_module
from oases.autotp.splitter import Splitter, Value, args_of, rule
from oases.moe.dispatch import by_expert, by_token
from oases.moe.experts import ExpertWeights, compute


def local_experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, first: int, gated: bool, activation: str
) -> Tensor:
    """Tokens [T, hidden] through the L experts of this rank, numbers `first` to `first + L - 1`; [T, hidden].

    index, weights: [T, k], global numbers and weights of each token's experts. up: [L, i or 2 i, hidden], down: [L,
    hidden, i]. Waits for the device, to know how many rows each expert gets.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    number = len(up)
    here = (index >= first) & (index < first + number)
    ids = torch.where(here, index - first, number)  # experts of other ranks come last
    rows, source, counts = by_expert(x.to(dtype), ids, number + 1)
    held = counts[:number].tolist()
    weighted = ExpertWeights(up.to(dtype), down.to(dtype))
    made = compute(rows[: sum(held)], held, weighted, gated=gated, activation=ACTIVATIONS[activation])
    return by_token(made, source, weights).to(x.dtype)


class OriginalForward:
    """The module's own forward on full parameters, as a function in a graph."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.__name__, self.__module__ = "own_forward", __name__  # generated graph code refers to these
        self._module, self._names = original_module(module), names

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        """Call the module's forward."""
        given = dict(zip(self._names, parameters, strict=True))
        found: Tensor = torch.func.functional_call(self._module, given, (x, index, weights))
        return found


@rule("oases.experts.default")
def experts(s: Splitter, node: fx.Node) -> Value:
    """Partial sum of this rank's experts; replicated where every rank holds all of them."""
    x, index, weights, parameters = args_of(node)
    names = [s.exported.parameters[each.name] for each in parameters]
    path = names[0].rpartition(".")[0]
    module = s.exported.layer.get_submodule(path)
    known: ExpertCollection = vars(module)["_collection"]
    mlp = known.mlp
    if known.whole:
        s.refused[path] = known.whole
    if mlp is None:
        given: tuple[Any, ...] = tuple(s.whole(each) for each in (x, index, weights, *parameters))
        return Value(s.call(OriginalForward(module, known.names), given, node))
    how: tuple[Any, ...] = (mlp.gated, mlp.activation)
    if known.whole:
        given = tuple(s.whole(each) for each in (x, index, weights, *parameters))
        return Value(s.call(local_experts, (*given, 0, *how), node))
    s.experts.extend(names)
    up, down = (s.cut(each, 0, (known.number,)) for each in parameters)
    first = s.rank * s.local(known.number)
    given = (s.entered(x), s.whole(index), s.entered(weights), up, down)
    return Value(s.call(local_experts, (*given, first, *how), node), None, True)
