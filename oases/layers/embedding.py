"""Vocabulary-parallel embedding: each rank holds a range of the table's rows.

Of two exact ways the one that sends fewer bytes is taken: sum the partial look-ups (2 x tokens x width), or gather
the table (rows x width), as for byte vocabularies.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.blocks.sharding import Cut, register_shards
from oases.core.execution.group import HoldsGroup, ProcessGroup, group_rank, group_size, resolve
from oases.distributed.collectives import agreed_group, form_of_input, gather, reduce
from oases.layers.chunks import is_real
from oases.layers.linear import shard, shard_size


def require_range(what: str, indices: Tensor, size: int) -> None:
    """Raise IndexError unless all indices lie in [0, size). CPU only: elsewhere it would wait for the device."""
    if indices.is_cpu and indices.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in indices.aminmax())
        if low < 0 or high >= size:
            raise IndexError(f"{what} {low if low < 0 else high} is out of range for a vocabulary of {size}")


def look_up(
    tokens: Tensor, weight: Tensor, rows: int, process_group: ProcessGroup, padding: int | None = None
) -> Tensor:
    """Rows of a vocabulary-parallel table, sharded by `Cut(0, (rows,))`: [...] -> [..., width], replicated.

    tokens: integers in [0, rows), equal on every rank. weight: this rank's rows, [about rows / t, width]. padding:
    row without a gradient. Every rank sees every token and computes its own rows' gradient.
    """
    require_range("token", tokens, rows)
    cut = Cut(0, (rows,))
    if rows < 2 * tokens.numel():
        return F.embedding(tokens, gather(weight, process_group, cut, "embedding table"), padding)
    ((first, last),) = cut.ranges(group_rank(process_group), group_size(process_group))
    mine = (tokens >= first) & (tokens < last)
    if padding is not None:
        padding = padding - first if first <= padding < last else None
    found = F.embedding((tokens - first).where(mine, 0), weight, padding)
    return reduce(found.where(mine.unsqueeze(-1), 0.0), process_group, "embedding")


class OverlappedEmbedding(HoldsGroup, nn.Module):
    """`nn.Embedding` whose rows are sharded over the group; bitwise equal to it where no row is summed.

    Tokens [...], integers below num_embeddings, equal on every rank -> [..., embedding_dim], replicated. weight:
    [num_embeddings / t, embedding_dim], this rank's rows.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx: int | None = None
        """Row without a gradient, as in `nn.Embedding`."""
        self.process_group = resolve(process_group)
        rows = shard_size("num_embeddings", num_embeddings, self.process_group)
        self.weight = nn.Parameter(torch.empty((rows, embedding_dim), device=device, dtype=dtype))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight)
        register_shards(self)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, process_group: ProcessGroup | None = None
    ) -> OverlappedEmbedding:
        """Shard a given table: this rank's rows of it, without a new random draw. Its padding row has no gradient.

        ValueError for options that need the full table (max_norm, scale_grad_by_freq) or other gradients (sparse).
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option) not in (None, False):
                raise ValueError(
                    f"an embedding with {option}={getattr(embedding, option)} cannot be sharded by rows; leave "
                    f"{option} out"
                )
        rows, width = embedding.weight.shape
        with torch.device("meta"):
            layer = cls(rows, width, process_group=process_group, dtype=embedding.weight.dtype)
        part = shard(embedding.weight.detach(), 0, layer.process_group)
        layer.weight = nn.Parameter(part.clone(), requires_grad=embedding.weight.requires_grad)
        layer.padding_idx = embedding.padding_idx
        return layer

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., embedding_dim]."""
        if self.tensor_parallel == 1:
            return F.embedding(tokens, self.weight, self.padding_idx)
        assert self.process_group is not None
        if is_real(tokens) and not torch.compiler.is_compiling():
            caller = f"the embedding of {self.num_embeddings} x {self.embedding_dim}"
            agreed_group(self._group_name, caller, None, about=form_of_input(tokens))
        return look_up(tokens, self.weight, self.num_embeddings, self.process_group, self.padding_idx)

    def extra_repr(self) -> str:
        """Full sizes, then the sharding."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tensor_parallel={self.tensor_parallel}"
