"""ParallelSpec: properties of a model that `parallelize` cannot infer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, TypeVar

from torch import nn

from oases.autotp.vocabulary import Vocabulary, find_vocabulary
from oases.errors import UsageError

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ParallelSpec:
    """Properties that `parallelize` cannot infer of a module that is not from transformers.

    inputs: (args, kwargs) of a sample call, tensors of the right shapes and types, with or without data; batch size
        and lengths may differ in later calls.
    layers: names of the lists of layers ("encoder.blocks"); None: every outermost list of modules of one class.
    replicate: patterns of parameter names in the model ("*.gate.weight") to replicate.
    vocabulary: name of the embedding to shard over the vocabulary; "" for none; None: the model's input embedding.
    heads: names of the linears that give logits over that vocabulary.
    loss: takes the loss of `train_step` from the model's result; None: its `loss`, first element, or itself.

        class Encoder(nn.Module):        # not from transformers, no recognisable names
            ...
        spec = ParallelSpec(inputs=((torch.empty(2, 64, 32),), {}), replicate=("*.gate.weight",))
        oases.parallelize(Encoder(), mesh=mesh, spec=spec)
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    layers: tuple[str, ...] | None = None
    replicate: tuple[str, ...] = ()
    vocabulary: str | None = None
    heads: tuple[str, ...] = ()
    loss: Callable[[Any], Any] | None = None

    def vocabulary_of(self, model: nn.Module) -> Vocabulary | None:
        """Embedding tables and heads to shard. UsageError for names of other modules."""
        if self.vocabulary == "":
            return None
        if self.heads and self.vocabulary is None:
            raise UsageError(f"spec names the heads {self.heads}; name the table of their vocabulary, too")
        if self.vocabulary is None:
            found = find_vocabulary(model)
            cut = found is not None and not any(self.keeps_whole(f"{name}.weight") for name in found.tables)
            return found if cut else None
        table, heads = _module(model, self.vocabulary or "", nn.Embedding), {}
        for name in self.heads:
            heads[name] = _module(model, name, nn.Linear)
            if heads[name].out_features != table.num_embeddings:
                raise UsageError(
                    f"spec: head {name!r} gives {heads[name].out_features} logits, and the vocabulary "
                    f"{self.vocabulary!r} has {table.num_embeddings} rows"
                )
        tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight is table.weight}
        tied = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight is table.weight}
        return Vocabulary(table.num_embeddings, tables, {**tied, **heads})

    def require_names(self, model: nn.Module) -> None:
        """Raise UsageError for a pattern that matches no parameter of the model."""
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for pattern in self.replicate:
            if not any(fnmatch(name, pattern) for name in names):
                raise UsageError(f"spec.replicate has {pattern!r}, which matches no parameter of the model")

    def keeps_whole(self, name: str) -> bool:
        """Whether a parameter is to be replicated."""
        return any(fnmatch(name, pattern) for pattern in self.replicate)


def _module(model: nn.Module, name: str, kind: type[M]) -> M:
    found = dict(model.named_modules()).get(name)
    if not isinstance(found, kind):
        raise UsageError(f"spec names {name!r}, which is {type(found).__name__} and not {kind.__name__}")
    return found
