"""Key-value caches of transformers in traced layers.

A layer's traced graph takes the keys and values of earlier tokens as inputs and gives those of new ones as results:
each rank caches its own heads. The cache stays the caller's and grows by its own `update`; masks and positions, which
the model computes from its lengths, are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.errors import UsageError

NO_CACHE = "call the model with use_cache=False"
"""Remedy for layers whose cache cannot be cut."""


class LayerCache(NamedTuple):
    """Part of a cache that a layer reads, as leaves of its call: keys and values, None before the first tokens.

    sliding: whether the cache drops tokens that are out of a window.
    """

    keys: Tensor | None
    values: Tensor | None
    sliding: bool


def is_layer_cache(value: Any) -> bool:
    """Whether a part of a call's arguments is a LayerCache."""
    return isinstance(value, LayerCache)


def cache_in(found: list[Any]) -> Any:
    """The key-value cache among the leaves of a call, or None."""
    return next((leaf for leaf in found if "Cache" in type(leaf).__name__), None)


class CacheSlot:
    """A layer's part of a cache. UsageError for caches other than DynamicCache, which grows by concatenation."""

    def __init__(self, cache: Any, layer: nn.Module) -> None:
        found: list[Any] = [getattr(part, "layer_idx", None) for part in layer.modules()]
        numbers = {each for each in found if isinstance(each, int)}
        what = type(cache).__name__
        if what != "DynamicCache" or cache.offloading or len(numbers) != 1:
            why = "has no single layer_idx" if len(numbers) != 1 else f"is sharded, and {what} is not a DynamicCache"
            raise UsageError(f"{type(layer).__name__} was given a key-value cache, but {why}; {NO_CACHE}")
        self._cache = cache
        (self._number,) = numbers

    def state(self) -> LayerCache:
        """Keys and values so far. UsageError for layers of a cache that keep anything else."""
        layers = self._cache.layers
        held = layers[self._number] if self._number < len(layers) else None
        if held is None:
            return LayerCache(None, None, False)
        kind = type(held).__name__
        if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer") or getattr(held, "record_past", False):
            raise UsageError(
                f"the key-value cache has a {kind}, of which the layer's shards are not known; {NO_CACHE}"
            )
        filled = held.is_initialized and held.keys.numel() > 0
        return LayerCache(held.keys if filled else None, held.values if filled else None, held.is_sliding)

    def update(self, keys: Tensor, values: Tensor) -> None:
        """Append the keys and values of new tokens."""
        self._cache.update(keys, values, self._number)


class _Traced:
    """Stub of a cache while a layer is traced; records its one `update`."""

    def __init__(self, held: LayerCache) -> None:
        self._held = held
        self.new: tuple[Tensor, Tensor] | None = None
        self.numbers = 0
        """Calls that gave it the layer's number."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens."""
        self.numbers += 1
        if self.new is not None:
            raise RuntimeError("it updates its key-value cache twice")
        self.new = (keys, values)
        if self._held.keys is None or self._held.values is None:
            return keys, values
        return torch.cat([self._held.keys, keys], -2), torch.cat([self._held.values, values], -2)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Number of tokens in this layer's part, or, once that is updated, in the part of any layer before it."""
        self.numbers += layer_idx is not None
        if self._held.sliding or (self.new is None and layer_idx is None):
            raise RuntimeError("it reads a length of its key-value cache that is not this layer's")
        parts = [self._held.keys, *(self.new or ())[:1]]
        return sum(part.shape[-2] for part in parts if part is not None)


def numbers_given(*arguments: Any) -> int:
    """Times that a traced layer gave its number to a cache among its arguments, and so read it for nothing else."""
    return sum(each.numbers for each in pytree.tree_leaves(arguments) if isinstance(each, _Traced))


def call_layer(layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of a layer; where a LayerCache is among its arguments, with the keys and values of the new tokens."""
    caches: list[_Traced] = []

    def traced(held: Any) -> Any:
        if not is_layer_cache(held):
            return held
        caches.append(_traced_class()(held))
        return caches[-1]

    args, kwargs = pytree.tree_map(traced, (args, kwargs), is_leaf=is_layer_cache)
    result = layer(*args, **kwargs)
    if not caches:
        return result
    if len(caches) > 1 or caches[0].new is None:
        raise RuntimeError("it does not keep its keys and values in the cache that it was given")
    return result, caches[0].new


def _traced_class() -> type[_Traced]:
    """`_Traced` as a DynamicCache, which layers ask their cache to be."""
    from transformers.cache_utils import DynamicCache

    return type("TracedCache", (_Traced, DynamicCache), {"layers": ()})
