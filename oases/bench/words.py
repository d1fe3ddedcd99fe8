"""Text as words: those of a corpus, numbered in descending order of frequency."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from oases.errors import UsageError
from oases.train.data import Corpus, TextCorpus

WORD = re.compile(r"[^\W\d_]+")


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

    def read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """`length` words from `start` on."""
        return np.asarray(self._words[start : start + length])

    def described(self) -> str:
        """E.g. "1000 words"."""
        return f"{self.num_tokens} words"

    @property
    def identity(self) -> dict[str, Any]:
        """Their number."""
        return {"words": self.num_tokens}
