"""A small recommender after DLRM (arXiv 1906.00091): tables of categories, dense features and their products."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    """Predicts a click.

    tables: categorical features, each with an embedding of `rows` rows of `width` numbers; features: dense ones.
    sparse: the tables' gradients are sparse tensors; else they are stored dense.
    """

    def __init__(self, tables: int, rows: int, width: int, features: int, *, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=sparse) for _ in range(tables))
        for table in self.tables:
            nn.init.normal_(table.weight, std=width**-0.5)  # type: ignore[arg-type]
        self.bottom = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, categories: Tensor, features: Tensor, clicks: Tensor) -> Tensor:
        """The mean cross-entropy. categories: int64 [batch, tables]; features [batch, features]; clicks [batch]."""
        dense = self.bottom(features)
        every = torch.stack([dense, *(table(ids) for table, ids in zip(self.tables, categories.T, strict=True))], 1)
        upper = torch.triu_indices(every.shape[1], every.shape[1], 1)
        products = (every @ every.transpose(1, 2))[:, upper[0], upper[1]]
        logits = self.top(torch.cat([dense, products], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, clicks)
