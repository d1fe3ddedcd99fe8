"""The experts that a rank computes in its graph of a layer, for the tokens that every rank has.

Each rank runs the author's router on the same values, so all choose the same, and takes the tokens through those of
their experts that it holds. What comes of it is its share of a sum over the ranks, like that of a row-parallel
product: the layer is cut at that sum, and other sub-batches hide it.
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
    """Tokens [T, hidden] through those of their experts that are among the L from `first` on, [T, hidden].

    index, weights: [T, k], of every token the numbers of its experts, among those of all ranks, and their weights.
    up: [L, i or 2 i, hidden], down: [L, hidden, i]. It waits for the device, which says how many rows an expert gets.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    number = len(up)
    here = (index >= first) & (index < first + number)
    ids = torch.where(here, index - first, number)  # those of other ranks come last
    rows, source, counts = by_expert(x.to(dtype), ids, number + 1)
    held = counts[:number].tolist()
    weighted = ExpertWeights(up.to(dtype), down.to(dtype))
    made = compute(rows[: sum(held)], held, weighted, gated=gated, activation=ACTIVATIONS[activation])
    return by_token(made, source, weights).to(x.dtype)


class OriginalForward:
    """A collection's own forward on whole parameters, as a function in a graph."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.__name__, self.__module__ = "own_forward", __name__  # which a graph's code calls it by
        self._module, self._names = original_module(module), names

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        """As the author has it."""
        given = dict(zip(self._names, parameters, strict=True))
        found: Tensor = torch.func.functional_call(self._module, given, (x, index, weights))
        return found


@rule("oases.experts.default")
def experts(s: Splitter, node: fx.Node) -> Value:
    """A sum over the ranks of what each one's experts give; whole where every rank holds all of them."""
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
