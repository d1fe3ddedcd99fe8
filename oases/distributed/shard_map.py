"""Map from each tensor of a sharded model's state to this rank's shard and its place in the full tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.blocks.sharding import Cut, cuts, holders
from oases.core.execution.failure import begin_call
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_of, group_rank, group_size
from oases.distributed.dtensors import is_tensor_parallel, part_of_rank
from oases.errors import UsageError

Index = tuple[slice, ...]
"""Index of a slice of a tensor: start and stop of each dimension."""
BLOCK_BYTES = 512 << 10
"""Approximate bytes per block of rows.

Small enough for the some twenty blocks that gloo and the heap keep; at 1 GB/s a block still takes far longer than the
start of a collective.
"""


@dataclass(frozen=True, eq=False)
class TensorShard:
    """One tensor of the state: this rank's shard, or all of it where it is replicated.

    names: its names in the state_dict, the one it is saved under first. aliases: names that transformers ties itself,
    so that a checkpoint need not have them. shape: of the full tensor. cut: None for a replicated tensor; else how it
    is sharded over process_group.
    """

    names: tuple[str, ...]
    aliases: frozenset[str]
    tensor: Tensor
    shape: tuple[int, ...]
    cut: Cut | None
    process_group: ProcessGroup | None

    @property
    def name(self) -> str:
        """Name that the tensor is saved under."""
        return self.names[0]

    @property
    def part(self) -> Tensor:
        """This rank's tensor-parallel part of the tensor, outside of autograd."""
        return part_of_rank(self.tensor).detach()

    @property
    def part_rows(self) -> int:
        """Rows of this rank's tensor-parallel part; 1 for a scalar."""
        if self.cut is None or self.cut.dim:
            return self.rows
        return sum(last - first for (first, last), _ in _spans(self.cut, self.process_group))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (index of the first dimension) of the full tensor."""
        return torch.Size(self.shape[1:]).numel() * self.tensor.element_size()

    @property
    def rows(self) -> int:
        """Rows of the full tensor; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def block_rows(self) -> int:
        """Rows of the full tensor per block."""
        return max(1, BLOCK_BYTES // max(1, self.row_bytes))

    def pieces(self) -> Iterator[tuple[Index, Index]]:
        """Iterate over (index in the full tensor, index in this shard) in blocks of rows."""
        if not self.shape:
            yield (), ()
            return
        spans = [] if self.cut is None else _spans(self.cut, self.process_group)
        by_rows = spans if self.cut is not None and self.cut.dim == 0 else [((0, self.rows), (0, self.rows))]
        for (first, last), (start, _) in by_rows:
            for row in range(first, last, self.block_rows):
                stop = min(last, row + self.block_rows)
                whole, local = (slice(row, stop),), (slice(row - first + start, stop - first + start),)
                if by_rows is spans or self.cut is None:
                    yield whole, local
                    continue
                between = (slice(None),) * (self.cut.dim - 1)
                for columns, own in spans:
                    yield (*whole, *between, slice(*columns)), (*local, *between, slice(*own))


def shard_map(model: nn.Module, process_group: ProcessGroup | None) -> list[TensorShard]:
    """Each tensor of the model's state_dict once, in its order.

    process_group: the sharding group where a module names none. UsageError for state that is not a tensor and for a
    shard whose length disagrees with its cut.
    """
    cut_by, held_by = cuts(model), holders(model)
    tied = frozenset(getattr(model, "all_tied_weights_keys", {}))
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise UsageError(f"state {name!r} is a {type(tensor).__name__}; only tensors can be loaded and saved")
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    found = []
    elsewhere: dict[str, str] = getattr(model, "oases_elsewhere", {})  # names on other stages of a pipeline
    for name, held in elsewhere.items():
        if held:
            names[next(key for key, known in names.items() if held in known)].append(name)
    for key, tensor in tensors.items():
        ordered = tuple(sorted(names[key], key=lambda name: name in tied))
        cut, group = cut_by.get(key), None
        if cut is not None:
            group = _cutting(ordered[0], held_by[key], process_group)
            cut = cut if group_size(group) > 1 else None
        shape = tuple(tensor.shape)
        if cut is not None and not is_tensor_parallel(tensor):
            shape = _whole(ordered[0], tensor, cut, group)
        found.append(TensorShard(ordered, tied.intersection(ordered), tensor, shape, cut, group))
    return found


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """One tensor of a model of which ranks may have different parts, such as pipeline stages.

    names, aliases, shape: as in `TensorShard`, with the names that any rank knows. leader: the first rank, of all
    ranks of the model, that has the tensor or a shard of it; None where it is on `meta` everywhere. shard: of this
    rank, None without.
    """

    names: tuple[str, ...]
    aliases: frozenset[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    leader: int | None
    shard: TensorShard | None

    @property
    def rows(self) -> int:
        """Rows of the full tensor; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (index of the first dimension) of the full tensor."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize


def tensors_of_model(model: nn.Module, process_group: ProcessGroup | None) -> list[ModelTensor]:
    """Each tensor of the whole model once, in the order of its ranks. Collective over process_group: all of them."""
    begin_call(process_group, "the state of a model", ("call", "save_pretrained() or full_state_dict()"), ())
    mine = shard_map(model, process_group)
    said = [(one.names, one.aliases, one.shape, one.tensor.dtype, one.tensor.is_meta) for one in mine]
    everyone = all_gather_objects(said, process_group)
    merged = united_names([{name: names[0] for names, *_ in said for name in names} for said in everyone])
    names: dict[str, dict[str, None]] = {}
    known: dict[str, Any] = {}
    leaders: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        for each, aliases, shape, dtype, is_meta in theirs:
            main = merged[each[0]]
            known.setdefault(main, (aliases, shape, dtype))
            names.setdefault(main, {}).update(dict.fromkeys(each))
            if not is_meta:
                leaders.setdefault(main, rank)
    held = {merged[one.name]: one for one in mine if not one.tensor.is_meta}
    return [
        ModelTensor(
            tuple(sorted(names[main], key=lambda name: name in aliases)), aliases, shape, dtype, leaders.get(main),
            held.get(main),
        )
        for main, (aliases, shape, dtype) in known.items()
    ]  # fmt: skip


def united_names(everyone: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """One name for all names of a tensor, where ranks know different ones. everyone: main name of each, by rank."""
    found: dict[str, str] = {}
    for names in everyone:
        together: dict[str, list[str]] = {}
        for name, main in names.items():
            together.setdefault(main, []).append(name)
        for main, others in together.items():
            known = {found[name] for name in others if name in found}
            first = min(known) if known else main
            if len(known) > 1:  # a rank knows that two tensors of others are one
                found.update({name: first for name, before in found.items() if before in known})
            found.update(dict.fromkeys(others, first))
    return found


def _cutting(name: str, holder: nn.Module, process_group: ProcessGroup | None) -> ProcessGroup | None:
    """The group that shards a module's tensors: its own, else process_group."""
    ranks: int = getattr(holder, "tensor_parallel", 1)
    named: str | None = getattr(holder, "_group_name", None)
    group = process_group if named is None else group_of(named)
    if ranks == 1:
        return None
    if group_size(group) != ranks:
        raise UsageError(
            f"{name!r} is sharded over {ranks} ranks, its group has {group_size(group)}; have its module name its "
            "group, or give that group as process_group"
        )
    return group


def _spans(cut: Cut, group: ProcessGroup | None) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """[start, stop) along the cut dimension in the full tensor and in this shard, per segment."""
    found, start = [], 0
    for first, last in cut.ranges(group_rank(group), group_size(group)):
        found.append(((first, last), (start, start + last - first)))
        start += last - first
    return found


def _whole(name: str, part: Tensor, cut: Cut, group: ProcessGroup | None) -> tuple[int, ...]:
    held = _spans(cut, group)[-1][1][1]
    if part.shape[cut.dim] != held:
        raise UsageError(
            f"{name!r} of shape {tuple(part.shape)} has {part.shape[cut.dim]} along dimension {cut.dim}, where rank "
            f"{group_rank(group)} of {group_size(group)} holds {held} of segments {cut.segments}; fix shard_segments"
        )
    return (*part.shape[: cut.dim], cut.size, *part.shape[cut.dim + 1 :])
