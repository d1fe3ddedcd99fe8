"""Sharding of parameters over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oases.errors import UsageError


@dataclass(frozen=True)
class Cut:
    """Division of a full tensor over the ranks of a group: along `dim`, each of its segments by itself.

    segments: lengths along `dim`, which sum to the full length. A fused query-key-value projection has three, so that
    every rank gets a part of each, as by torch.chunk: parts of a vocabulary that does not divide are smaller on the
    last ranks. level: parts that differ by one at most, as of tokens.
    """

    dim: int
    segments: tuple[int, ...]
    level: bool = False

    @property
    def size(self) -> int:
        """Full length along `dim`."""
        return sum(self.segments)

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """[start, stop) in the full tensor of the shard of `rank`, one range per segment."""
        found, first = [], 0
        for length in self.segments:
            most = -(-length // ranks)
            begin, end = (length * at // ranks if self.level else min(length, most * at) for at in (rank, rank + 1))
            found.append((first + begin, first + end))
            first += length
        return found

    def take(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Shard of `rank`; a view where there is one segment. ValueError for a tensor of another length."""
        if whole.shape[self.dim] != self.size:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} has {whole.shape[self.dim]} along dimension {self.dim}, "
                f"where {self.size} are to be cut over {ranks} ranks"
            )
        parts = [whole.narrow(self.dim, first, last - first) for first, last in self.ranges(rank, ranks)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Full tensor from the shards of all ranks, in rank order."""
        by_rank = [
            part.split([last - first for first, last in self.ranges(rank, len(parts))], self.dim)
            for rank, part in enumerate(parts)
        ]
        return torch.cat([piece for segment in zip(*by_rank, strict=True) for piece in segment], self.dim)


def sharded_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter, int]]:
    """(name, parameter, sharded dimension) of each tensor-parallel parameter, each once.

    A module declares them by its attribute `shard_dims`.
    """
    found: dict[int, tuple[str, nn.Parameter, int]] = {}
    for prefix, child, name, dim in _cut(module):
        parameter = getattr(child, name)
        found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter, dim))
    return list(found.values())


def cuts(module: nn.Module) -> dict[int, Cut]:
    """Cut of each sharded parameter, by its id.

    Segments are those of the module's `shard_segments`, by parameter name; without it every rank holds as much as
    this one.
    """
    found: dict[int, Cut] = {}
    for _, child, name, dim in _cut(module):
        parameter = getattr(child, name)
        whole = parameter.shape[dim] * getattr(child, "tensor_parallel", 1)
        segments = getattr(child, "shard_segments", {}).get(name, (whole,))
        found.setdefault(id(parameter), Cut(dim, tuple(segments)))
    return found


def holders(module: nn.Module) -> dict[int, nn.Module]:
    """Module that declares a sharded parameter, by the parameter's id; its group, if any, shards it."""
    found: dict[int, nn.Module] = {}
    for _, child, name, _ in _cut(module):
        found.setdefault(id(getattr(child, name)), child)
    return found


def sharded_modules(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, path) of each module that declares sharded parameters, each once."""
    return list({id(child): (child, prefix) for prefix, child, _, _ in _cut(module)}.values())


_watchers: list[Callable[[nn.Module], None]] = []


def watch_shards(watcher: Callable[[nn.Module], None]) -> None:
    """Have `watcher` called with every module whose sharded parameters are registered from now on."""
    _watchers.append(watcher)


def register_shards(module: nn.Module) -> None:
    """Tell watchers of a module with sharded parameters, its own or its submodules'."""
    for watcher in _watchers:
        watcher(module)


def _cut(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, int]]:
    for prefix, child in module.named_modules():
        for name, dim in getattr(child, "shard_dims", {}).items():
            if getattr(child, name, None) is None:
                continue
            if name in getattr(child, "parametrizations", ()):
                raise UsageError(
                    f"{prefix or type(child).__name__}.{name} is computed from other parameters, as by "
                    "torch.nn.utils.parametrizations, and shards of those are no shards of it; leave the "
                    "parametrization out"
                )
            yield prefix, child, name, dim
