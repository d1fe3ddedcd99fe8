"""Models with large embeddings and the data they train on, for the benchmark of sparse gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from oases.bench.sparse_config import SparseBenchConfig
from oases.bench.words import WordCorpus
from oases.models.recommender import Recommender
from oases.models.word_lstm import WordLSTM, log_uniform

Batch = tuple[Tensor, ...]
"""What a model takes; it returns the loss."""
VALIDATION_BATCHES = 8


class Workload(Protocol):
    """A model and its batches, which are the same for every mode."""

    tables: frozenset[str]
    """Parameters whose gradients have few rows."""

    def model(self, seed: int, sparse: bool) -> nn.Module:
        """A new one, the same on every rank."""

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        """For training."""

    def validation(self, rank: int) -> list[Batch]:
        """Held out."""


class LanguageWorkload:
    """The word-level LSTM on local text."""

    tables = frozenset({"embedding.weight", "softmax.weight"})

    def __init__(self, config: SparseBenchConfig, words: Path) -> None:
        self.config, self.corpus = config, WordCorpus(words)

    def model(self, seed: int, sparse: bool) -> nn.Module:
        """A `WordLSTM`."""
        torch.manual_seed(seed)
        return WordLSTM(self.config.vocabulary, self.config.width, sparse=sparse)

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        """Words, those after them, and negatives that all ranks share."""
        config = self.config
        generator = torch.Generator().manual_seed(1000 * seed + step)
        negatives = log_uniform(config.negatives, config.vocabulary, generator)
        return *self._windows("train", step, 1000 * seed + rank), negatives

    def validation(self, rank: int) -> list[Batch]:
        """Without negatives: the whole softmax."""
        return [self._windows("validation", step, rank) for step in range(VALIDATION_BATCHES)]

    def _windows(self, split: str, step: int, seed: int) -> tuple[Tensor, Tensor]:
        sizes = {"batch": self.config.batch, "sequence": self.config.sequence}
        return self.corpus.batch(split=split, step=step, seed=seed, **sizes)


class ClickWorkload:
    """The recommender on clicks that a hidden model makes, of categories that follow Zipf's law."""

    FEATURES = 8

    def __init__(self, config: SparseBenchConfig) -> None:
        self.config = config
        self.tables = frozenset(f"tables.{index}.weight" for index in range(config.tables))
        generator = torch.Generator().manual_seed(-1)
        self._tastes = torch.randn(config.tables, config.vocabulary, generator=generator)
        self._weights = torch.randn(self.FEATURES, generator=generator)

    def model(self, seed: int, sparse: bool) -> nn.Module:
        """A `Recommender`."""
        config = self.config
        torch.manual_seed(seed)
        return Recommender(config.tables, config.vocabulary, config.width, self.FEATURES, sparse=sparse)

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        """Categories, features and clicks."""
        config = self.config
        generator = torch.Generator().manual_seed((seed + 2) * 1_000_003 + step * 1009 + rank)
        samples = config.batch * config.sequence
        categories = log_uniform(samples * config.tables, config.vocabulary, generator).view(samples, config.tables)
        features = torch.randn(samples, self.FEATURES, generator=generator)
        liking = self._tastes.gather(1, categories.T).sum(0) + features @ self._weights
        clicks = (torch.rand(samples, generator=generator) < torch.sigmoid(liking)).float()
        return categories, features, clicks

    def validation(self, rank: int) -> list[Batch]:
        """Of a seed that no training has."""
        return [self.batch(-1, step, rank) for step in range(VALIDATION_BATCHES)]
