"""Pieces of a full tensor that a rank has, and `StateShard`, by which torch.distributed.checkpoint reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oases.core.blocks.sharding import Cut
from oases.errors import UsageError

_REWRAPPED = ("aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::empty_like", "aten::lift_fresh")
"""Ops after which a shard is still the same part of a full tensor."""


class Piece(NamedTuple):
    """Box of a full tensor: its offsets there, its first indices in this rank's part, and its sizes."""

    offsets: tuple[int, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]


def pieces_of(
    shape: Sequence[int], cut: Cut | None, rank: int, ranks: int, rows: tuple[int, int] | None = None
) -> tuple[Piece, ...]:
    """Boxes of a full tensor of `shape` that are in this rank's part.

    cut: over `ranks`, of which this is `rank`; None: not cut. rows: [first, last) of the rows of that part which this
    rank has, where FSDP shards it again; None: all.
    """
    none = (0,) * len(shape)
    if cut is None:
        found = [Piece(none, none, tuple(shape))]
    else:
        found, begin = [], 0
        for first, last in cut.ranges(rank, ranks):
            at = (_put(none, cut.dim, first), _put(none, cut.dim, begin), _put(shape, cut.dim, last - first))
            found.append(Piece(*at))
            begin += last - first
    if rows is None:
        return tuple(found)
    parts = []
    for offsets, begins, sizes in found:
        first, last = max(rows[0], begins[0]), min(rows[1], begins[0] + sizes[0])
        if first < last:
            where = _put(offsets, 0, offsets[0] + first - begins[0])
            parts.append(Piece(where, _put(begins, 0, first - rows[0]), _put(sizes, 0, last - first)))
    return tuple(parts)


def _put(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


class StateShard(Tensor):
    """This rank's part, `local`, of a tensor of the full `shape`. Read and written by checkpoints alone.

    pieces: what the part consists of (see `pieces_of`). Any op but copies raises NotImplementedError.
    """

    local: Tensor
    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls: type[StateShard], local: Tensor, shape: Sequence[int], pieces: tuple[Piece, ...]) -> StateShard:
        """Wrap a tensor."""
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)  # type: ignore[attr-defined]
        made.local, made.pieces = local.detach(), pieces
        found: StateShard = made
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        """Local and full shape."""
        return f"StateShard({tuple(self.local.shape)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy a shard."""
        if function._schema.name == "aten::new_empty" and tuple(args[1]) == args[0].shape:  # of async_save
            (this, _) = args
            return StateShard(this.local.new_empty(this.local.shape, **(kwargs or {})), this.shape, this.pieces)
        if function._schema.name in _REWRAPPED:
            (this, *rest) = args
            return StateShard(function(this.local, *rest, **(kwargs or {})), this.shape, this.pieces)
        raise NotImplementedError(f"{function} on a part of a checkpoint")

    # --- interface of torch.distributed.checkpoint ---

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        """One write item per piece."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for piece, chunk in zip(self.pieces, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Place and size of each piece."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in self.pieces]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The piece at an index, sharing memory with `local`."""
        piece = next(piece for piece in self.pieces if piece.offsets == tuple(index.offset))
        found = self.local
        for dim, (begin, size) in enumerate(zip(piece.begins, piece.sizes, strict=True)):
            found = found.narrow(dim, begin, size)
        return found


class PlainShard(Tensor):
    """Shard in a `state_dict()` that is no DTensor: a tensor that torch.distributed.checkpoint refuses.

    It would take the ranks' shards for replicas, of which one is written. Pickles are those of a tensor.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any function as on a tensor; copies stay shards."""
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        copies = getattr(function, "__name__", "") in ("detach", "clone", "to", "cpu", "copy_", "contiguous")
        return found.as_subclass(PlainShard) if copies and isinstance(found, Tensor) else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __create_write_items__(self, name: str, _: Any) -> Any:
        """Raise UsageError."""
        raise refused_shard(name)

    def __create_chunk_list__(self) -> Any:
        """Raise UsageError."""
        raise refused_shard(f"a tensor of shape {tuple(self.shape)}")


def refused_shard(name: str) -> UsageError:
    """Error of torch.distributed.checkpoint with a plain shard."""
    return UsageError(
        f"{name} is this rank's shard of a tensor, and no DTensor, and torch.distributed.checkpoint would take the "
        "ranks' shards for replicas; call oases.save_checkpoint and load_checkpoint, or oases.full_state_dict"
    )
