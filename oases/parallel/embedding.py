"""Vocabulary-parallel embedding: each rank holds an equal range of the table's rows.

Looking up is free next to sending activations, so the cheaper of two exact ways is taken by bytes: sum the
partial look-ups (2 x tokens x width on the wire), or gather the table (rows x width), as byte models want.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.parallel.collectives import reduce
from oases.parallel.group import HoldsGroup, ProcessGroup, group_rank, resolve, scheduler_of, shard_size
from oases.parallel.linear import shard


def require_range(what: str, indices: Tensor, size: int) -> None:
    """Raise IndexError, as torch does for one process, unless all indices lie in [0, size). CPU only: on an
    accelerator the check would wait for the device.
    """
    if indices.is_cpu and indices.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in indices.aminmax())
        if low < 0 or high >= size:
            raise IndexError(f"{what} {low if low < 0 else high} is out of range for a vocabulary of {size}")


class _GatherTable(torch.autograd.Function):
    """[rows / t, width] -> [rows, width]. Every rank sees every token, so each computes its own rows' gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, process_group: ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        scheduler = scheduler_of(process_group)
        table = weight.new_empty((weight.shape[0] * scheduler.size, weight.shape[1]))
        scheduler.wait(scheduler.all_gather(table, weight.detach().contiguous(), "embedding table"))
        return table

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return shard(grad, 0, ctx.process_group).contiguous(), None


class OverlappedEmbedding(HoldsGroup, nn.Module):
    """`nn.Embedding` whose rows are cut over the group; equal to it to the last bit where no row is summed.

    Tokens [...], integers below num_embeddings and the same on every rank -> [..., embedding_dim], whole.
    weight: [num_embeddings / t, embedding_dim], this rank's rows.
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
        self.process_group = resolve(process_group)
        rows = shard_size("num_embeddings", num_embeddings, self.process_group)
        self.weight = nn.Parameter(torch.empty((rows, embedding_dim), device=device, dtype=dtype))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, process_group: ProcessGroup | None = None
    ) -> OverlappedEmbedding:
        """Cut a given table: this rank's rows of it, never a new draw."""
        rows, width = embedding.weight.shape
        with torch.device("meta"):
            layer = cls(rows, width, process_group=process_group, dtype=embedding.weight.dtype)
        part = shard(embedding.weight.detach(), 0, layer.process_group)
        layer.weight = nn.Parameter(part.clone(), requires_grad=embedding.weight.requires_grad)
        return layer

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., embedding_dim]."""
        if self.tensor_parallel == 1:
            return F.embedding(tokens, self.weight)
        assert self.process_group is not None
        require_range("token", tokens, self.num_embeddings)
        if self.num_embeddings < 2 * tokens.numel():
            return F.embedding(tokens, _GatherTable.apply(self.weight, self.process_group))
        rows = self.weight.shape[0]
        local = tokens - group_rank(self.process_group) * rows
        mine = (local >= 0) & (local < rows)
        found = F.embedding(local.where(mine, 0), self.weight)
        return reduce(found.where(mine.unsqueeze(-1), 0.0), self.process_group, "embedding")

    def extra_repr(self) -> str:
        """Whole sizes, then how they are cut."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tensor_parallel={self.tensor_parallel}"
