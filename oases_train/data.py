"""Text corpora: all text files under a path, memory-mapped, with bytes as tokens.

A corpus is divided into blocks of 65536 tokens; every twentieth is held out for validation. A sample is a window
within one block, so no training sample contains held-out tokens. Sampling is a pure function of seed and step.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import os
import sysconfig
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oases.errors import UsageError

BLOCK_TOKENS = 65_536
HOLD_OUT_EVERY = 20

PIECE_CHARACTERS = 2**18
"""Characters read at once. Pieces end at a line break, or at a space where there is none."""

Documents = Iterator[Iterator[str]]
"""Texts, each an iterator of pieces that are read lazily."""


class Corpus(ABC):
    """Sequence of tokens from which training and validation samples are drawn.

    path: source of the text. num_tokens: total. unit: name of a token in messages. identity: plain values that differ
    for corpora with different batches. description: for messages.
    """

    path: Path
    num_tokens: int
    identity: dict[str, Any]
    description: str
    unit = "tokens"

    def __init__(self) -> None:
        self._windows = lru_cache(maxsize=8)(self._blocks)

    @abstractmethod
    def read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """Read tokens start to start + length, unsigned integers [length]."""

    def batch(self, *, split: str, step: int, batch: int, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw a batch: inputs and targets, int64 [batch, sequence] each; targets are shifted by one token.

        split: "train" or "validation". Equal arguments give equal batches on all ranks.
        Raises UsageError where the split has no window of sequence + 1 tokens.
        """
        window = sequence + 1
        blocks = self._windows(split, window)
        if not blocks:
            raise UsageError(
                f"data {str(self.path)!r} has {self.num_tokens} {self.unit}, too few for a {split} window of "
                f"{window}; give more text or a shorter --sequence"
            )
        generator = np.random.default_rng([seed, step, split == "train"])
        rows = []
        for pick in generator.integers(len(blocks), size=batch):
            start, end = blocks[pick]
            rows.append(self.read(start + int(generator.integers(end - start - window + 1)), window))
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def samples(self, **draw: Any) -> dict[str, Tensor]:
        """Draw a batch for a transformers model, which shifts labels itself: the inputs of `batch`, as both."""
        tokens, _ = self.batch(**draw)
        return {"input_ids": tokens, "labels": tokens}

    def pairs(self, *, sequence: int, **draw: Any) -> dict[str, Tensor]:
        """Draw a batch for an encoder-decoder: text in input_ids, the text after it in labels.

        int64 [batch, sequence] each. UsageError as for `batch`, whose window is twice the sequence here.
        """
        tokens, targets = self.batch(sequence=2 * sequence - 1, **draw)
        return {"input_ids": tokens[:, :sequence].contiguous(), "labels": targets[:, sequence - 1 :].contiguous()}

    def _blocks(self, split: str, window: int) -> list[tuple[int, int]]:
        size = min(BLOCK_TOKENS, max(self.num_tokens // HOLD_OUT_EVERY, 1))
        size = max(size, window)  # a small corpus in 20 blocks, a long window in one of its own
        blocks = []
        for index, start in enumerate(range(0, self.num_tokens, size)):
            held_out = index % HOLD_OUT_EVERY == HOLD_OUT_EVERY // 2
            end = min(start + size, self.num_tokens)
            if held_out == (split == "validation") and end - start >= window:
                blocks.append((start, end))
        return blocks


class TextCorpus(Corpus):
    """Concatenation of all text files under `path` (default: Python's standard library), sorted by name.

    A file is text if its first 4096 bytes hold no NUL byte and decode as UTF-8. Raises UsageError for a path that is
    missing, unreadable, empty, or holds no text.
    """

    unit = "bytes"

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if path is not None and not str(path):
            raise UsageError("data path '' is empty; give a text file or a folder of them")
        self.path = Path(sysconfig.get_paths()["stdlib"] if path is None else path)  # text that every machine has
        skipped = Counter[str]()
        self.files: list[Path] = []
        for file in sorted(self._candidates(path is None)):
            try:
                fault = _fault(file)
            except OSError as error:
                if file == self.path:
                    raise UsageError(f"data {str(file)!r} cannot be read: {error.strerror}") from error
                fault = "unreadable"
            if fault:
                skipped[fault] += 1
            else:
                self.files.append(file)
        if not self.files:
            why = ", ".join(f"{count} {what}" for what, count in skipped.items())
            what = f"holds no text file ({why or 'it is empty'})"
            if self.path.is_file():
                what = f"is {next(iter(skipped))}"
            raise UsageError(f"data {str(self.path)!r} {what}; give a text file or a folder of them")
        ends = [0, *itertools.accumulate(file.stat().st_size for file in self.files)]
        self._starts, self.num_tokens = ends[:-1], ends[-1]
        self.identity = {"bytes": self.num_tokens}  # the field of all checkpoint formats
        self.description = f"{len(self.files)} text files, {self.num_tokens / 1e6:.1f} MB, from {self.path}"
        # Mapped lazily in each process; a bounded cache, so that no limit on file descriptors is hit.
        self._map = lru_cache(maxsize=64)(lambda index: np.memmap(self.files[index], np.uint8, mode="r"))

    def _candidates(self, library: bool) -> Iterator[Path]:
        if not self.path.exists():
            raise UsageError(f"data path {str(self.path)!r} does not exist")
        if self.path.is_file():
            yield self.path
            return
        for folder, folders, names in os.walk(self.path, onerror=self._unreadable):
            if library:
                folders[:] = [name for name in folders if name not in ("site-packages", "__pycache__")]
            yield from (Path(folder) / name for name in names if not library or name.endswith(".py"))

    def _unreadable(self, error: OSError) -> None:
        if error.filename == str(self.path):
            raise UsageError(f"data path {str(self.path)!r} cannot be read: {error.strerror}") from error

    def documents(self) -> Documents:
        """Text of each file. UsageError for a file that is not UTF-8 beyond its first bytes."""
        return (_pieces(file) for file in self.files)

    def read(self, start: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read bytes start to start + length, uint8 [length]."""
        pieces = []
        index = bisect_right(self._starts, start) - 1
        while length > 0:
            offset = start - self._starts[index]
            piece = self._map(index)[offset : offset + length]
            pieces.append(piece)
            start, length, index = start + len(piece), length - len(piece), index + 1
        return np.concatenate(pieces)


def stamp(files: Iterable[Path]) -> str:
    """Hash of files' paths, sizes and modification times."""
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(f"{file.resolve()} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _pieces(file: Path) -> Iterator[str]:
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    with file.open("rb") as stream:
        try:
            while block := stream.read(PIECE_CHARACTERS):
                rest += decoder.decode(block)
                end = 1 + (rest.rfind("\n") if "\n" in rest else rest.rfind(" ")) or len(rest)
                yield rest[:end]
                rest = rest[end:]
            rest += decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"data {str(file)!r} is not UTF-8 before byte {stream.tell()}: {error.reason}; convert the file, "
                "leave it out, or train on bytes without a tokenizer"
            ) from error
    if rest:
        yield rest


def _fault(file: Path) -> str:
    """Why a file is no text; empty for text."""
    with file.open("rb") as stream:
        head = stream.read(4096)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character may go on behind the head
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return "" if head and b"\0" not in head else "not UTF-8 text" if head else "empty"
