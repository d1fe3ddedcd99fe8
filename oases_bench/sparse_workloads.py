"""Models with large embeddings and the data they train on, for the benchmark of sparse gradients."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oases.errors import UsageError
from oases.models.options import option
from oases_bench.harness import BenchConfig
from oases_train.data import Corpus, TextCorpus

Batch = tuple[Tensor, ...]
"""Inputs of a model that returns the loss."""
VALIDATION_BATCHES = 8
WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class WorkloadConfig(BenchConfig):
    """Sizes of a model and its batches."""

    vocabulary: int = option(32768, "words, or rows of each table")
    width: int = option(128, "of embeddings and hidden layers")
    tables: int = option(4, "of the recommender")
    batch: int = option(16, "samples per step and rank")
    sequence: int = option(20, "words per sample")
    negatives: int = option(512, "words that a target is told apart from")


def log_uniform(count: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """`count` words drawn with the chances of `log_chances`, int64 [count]; a word may come more than once."""
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return ((drawn * math.log(vocabulary + 1)).exp().long() - 1).clamp(0, vocabulary - 1)


def log_chances(words: Tensor, vocabulary: int) -> Tensor:
    """The logarithm of each word's chance under Zipf's law, words in descending order of frequency."""
    return torch.log(torch.log1p(1 / (words + 1.0)) / math.log(vocabulary + 1))


class WordLSTM(nn.Module):
    """An LSTM between an embedding and a sampled softmax (Jean et al., arXiv 1412.2007, as TensorFlow has it).

    vocabulary: words, numbered in descending order of frequency. width: of embedding, LSTM and softmax. sparse: the
    two tables' gradients are sparse tensors, of the rows that a step used; else they are stored dense, the other rows
    zero. The softmax's weight is an nn.Embedding, which is how DDP knows such a gradient.
    """

    def __init__(self, vocabulary: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.softmax = nn.Embedding(vocabulary, width, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.softmax.weight, std=width**-0.5)

    def forward(self, inputs: Tensor, targets: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The mean cross-entropy in nats. inputs, targets: int64 [batch, time].

        negatives: int64 [count] of `log_uniform`: which word among a target and these was the target is what is
        learnt, each logit less the logarithm of its word's chance to be among them, so that logits become those of
        the whole softmax. None: the softmax over the whole vocabulary, whose gradient has all rows.
        """
        hidden = self.lstm(self.embedding(inputs))[0].flatten(0, 1)
        wanted = targets.flatten()
        if negatives is None:
            return F.cross_entropy(hidden @ self.softmax.weight.T, wanted)
        rows = self.softmax(torch.cat([wanted, negatives]))
        right, others = rows.split([wanted.shape[0], negatives.shape[0]])
        logits = hidden @ others.T - log_chances(negatives, self.vocabulary)
        logits = logits.masked_fill(wanted[:, None] == negatives, -math.inf)
        right_logits = (hidden * right).sum(1) - log_chances(wanted, self.vocabulary)
        return F.cross_entropy(torch.cat([right_logits[:, None], logits], 1), torch.zeros_like(wanted))


class Recommender(nn.Module):
    """A small recommender after DLRM (arXiv 1906.00091): tables of categories, dense features and their products.

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


def write_words(path: str | None, vocabulary: int, target: Path) -> str:
    """Number the words of a text's files (None: Python's standard library) and write the numbers to `target`.

    Words beyond the vocabulary share the last number. Returns what was read, in words for a person. UsageError where
    the text has fewer different words than the vocabulary.
    """
    corpus = TextCorpus(path)
    first_seen: dict[str, int] = {}
    pieces = [
        np.fromiter((first_seen.setdefault(word.lower(), len(first_seen)) for word in WORD.findall(piece)), np.int32)
        for document in corpus.documents()
        for piece in document
    ]
    if len(first_seen) < vocabulary:
        raise UsageError(
            f"data {str(corpus.path)!r} has {len(first_seen)} different words, fewer than --vocabulary {vocabulary}; "
            "give more text or a smaller vocabulary"
        )
    words = np.concatenate(pieces)
    counts = Counter(dict(enumerate(np.bincount(words).tolist())))
    number = np.full(len(first_seen), vocabulary - 1, np.int32)
    for rank, (word, _) in enumerate(counts.most_common(vocabulary - 1)):
        number[word] = rank
    np.save(target, number[words])
    return f"{len(words):,} words, {len(first_seen):,} of them different, from {corpus.path}"


class WordCorpus(Corpus):
    """The numbers that `write_words` wrote."""

    unit = "words"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._words = np.load(path, mmap_mode="r")
        self.num_tokens = len(self._words)
        self.identity, self.description = {"words": self.num_tokens}, f"{self.num_tokens} words"

    def read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """`length` words from `start` on."""
        return np.asarray(self._words[start : start + length])


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

    def __init__(self, config: WorkloadConfig, words: Path) -> None:
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

    def __init__(self, config: WorkloadConfig) -> None:
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
        """Held-out batches, from a seed that no training uses."""
        return [self.batch(-1, step, rank) for step in range(VALIDATION_BATCHES)]
