"""What a user says of a model where it cannot be inferred."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any


@dataclass(frozen=True)
class ParallelSpec:
    """What `parallelize` cannot infer of a module that is not from transformers.

    inputs: (args, kwargs) of a sample call, tensors of the right shapes and types, with or without data; other batch
        sizes and lengths come later as they like.
    layers: names of the lists of layers ("encoder.blocks"); None: every outermost list of modules of one class.
    replicate: patterns of parameter names, as the model names them ("*.gate.weight"), that stay whole.
    vocabulary: the name of the embedding to cut over the vocabulary; "" for none; None: the model's input embedding.
    heads: names of the linears that give logits over that vocabulary.

        class Encoder(nn.Module):        # no transformers, no names that anything could guess from
            ...
        spec = ParallelSpec(inputs=((torch.empty(2, 64, 32),), {}), replicate=("*.gate.weight",))
        oases.parallelize(Encoder(), mesh=mesh, spec=spec)
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    layers: tuple[str, ...] | None = None
    replicate: tuple[str, ...] = ()
    vocabulary: str | None = None
    heads: tuple[str, ...] = ()

    def keeps_whole(self, name: str) -> bool:
        """Whether a parameter is to stay whole."""
        return any(fnmatch(name, pattern) for pattern in self.replicate)
