"""Sharding rule of expert modules: each rank computes its own experts for the tokens that all ranks hold.

Every rank runs the model's router on the same values, so all ranks agree on the routing, and runs the tokens of its
own experts. The result is a partial sum, as of a row-parallel linear: the layer is cut at its all-reduce, which other
sub-batches overlap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from oases.autotp.balanced import balanced_experts
from oases.autotp.experts import ExpertCollection, ExpertMlp, original_module
from oases.autotp.op_table import args_of
from oases.autotp.splitter import Splitter, Value, rule
from oases.moe.dispatch import by_expert, by_token


class LocalExperts:
    """Tokens through the L experts of this rank, numbers `first` to `first + L - 1`, as a function in a graph."""

    def __init__(self, mlp: ExpertMlp, first: int) -> None:
        self.__name__, self.__module__ = "local_experts", __name__  # generated graph code refers to these
        self._mlp, self._first = mlp, first

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        """Tokens [T, hidden] -> [T, hidden]. index, weights: [T, k], numbers of all experts and their weights.

        Waits for the device, to know how many rows each expert gets.
        """
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        number = len(parameters[0])
        here = (index >= self._first) & (index < self._first + number)
        ids = torch.where(here, index - self._first, number)  # experts of other ranks come last
        rows, source, counts = by_expert(x.to(dtype), ids, number + 1)
        held = counts[:number].tolist()
        weighted = self._mlp.weights([each.to(dtype) for each in parameters])
        made = self._mlp.run(rows[: sum(held)], held, weighted)
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
    if mlp is None or known.whole:
        run: Any = OriginalForward(module, known.names) if mlp is None else LocalExperts(mlp, 0)
        return Value(s.call(run, tuple(s.whole(each) for each in (x, index, weights, *parameters)), node))
    s.experts.extend(names)
    given = (s.entered(x), s.whole(index), s.entered(weights))
    shards = tuple(s.cut(each, 0, (known.number,)) for each in parameters)
    if known.balanced:
        s.balanced[path] = mlp, known.number
        return Value(s.call(balanced_experts, (s.state(path), *given, *shards), node), None, True)
    local = LocalExperts(mlp, s.rank * s.local(known.number))
    return Value(s.call(local, (*given, *shards), node), None, True)
