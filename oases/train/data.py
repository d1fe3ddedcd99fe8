"""Text as training data: every text file under a path, bytes as tokens, memory-mapped.

A corpus is cut into blocks of 65536 tokens; every twentieth is held out for validation. A sample is a window that
lies in one block, so no training window touches a held-out token. Which window: a pure function of seed and step.
"""

from __future__ import annotations

import codecs
import hashlib
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
"""Of text that is read at once. Pieces end with a line, or a word where there is no line."""

Documents = Iterator[Iterator[str]]
"""Texts, each in pieces that are read when they are asked for."""


def standard_library() -> Path:
    """Where this Python keeps the source of its standard library: text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


class Corpus(ABC):
    """Tokens in a row, and the windows of them that are samples.

    num_tokens: of the whole. unit: what a token is, in words. path: where they come from.
    """

    path: Path
    num_tokens: int
    unit = "tokens"

    def __init__(self) -> None:
        self._windows = lru_cache(maxsize=8)(self._blocks)

    @abstractmethod
    def read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """`length` tokens from `start` on, unsigned integers [length]."""

    @abstractmethod
    def described(self) -> str:
        """What it is, in words for a person."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What tells its batches from those of another corpus, as plain values."""

    def batch(self, *, split: str, step: int, batch: int, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch, sequence] each, targets one token ahead.

        split: "train" or "validation". Equal arguments give equal batches, on any rank.
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
    """All text files under `path` (default: the Python standard library's source), joined in order of name.

    A file is text if its beginning holds no NUL byte and decodes as UTF-8. Raises UsageError for a path that is
    missing, unreadable, empty, or holds no text.
    """

    unit = "bytes"

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if path is not None and not str(path):
            raise UsageError("data path '' is empty; give a text file or a folder of them")
        self.path = Path(path) if path is not None else standard_library()
        skipped = Counter[str]()
        files = sorted(self._candidates(path is None))
        self._files: list[Path] = []
        self._starts: list[int] = []
        self.num_bytes = 0
        for file in files:
            try:
                size = file.stat().st_size
                if not size:
                    skipped["empty"] += 1
                elif not _is_text(file):
                    skipped["not UTF-8 text"] += 1
                else:
                    self._files.append(file)
                    self._starts.append(self.num_bytes)
                    self.num_bytes += size
            except OSError as error:
                if file == self.path:
                    raise UsageError(f"data {str(file)!r} cannot be read: {error.strerror}") from error
                skipped["unreadable"] += 1
        self.num_tokens = self.num_bytes
        self.skipped = dict(skipped)
        if not self._files:
            why = ", ".join(f"{count} {what}" for what, count in skipped.items())
            what = (
                f"is {next(iter(skipped))}" if self.path.is_file() else f"holds no text file ({why or 'it is empty'})"
            )
            raise UsageError(f"data {str(self.path)!r} {what}; give a text file or a folder of them")
        # Each worker process maps files by itself; open ones are few, so that no limit on descriptors is hit.
        self._map = lru_cache(maxsize=64)(lambda index: np.memmap(self._files[index], np.uint8, mode="r"))

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

    @property
    def num_files(self) -> int:
        """Text files found."""
        return len(self._files)

    @property
    def identity(self) -> dict[str, Any]:
        """Its size, by which records of checkpoints have always known it."""
        return {"bytes": self.num_bytes}

    @property
    def fingerprint(self) -> str:
        """Of the files: their names, sizes and times of change."""
        return stamp(self._files)

    def described(self) -> str:
        """E.g. "3 text files, 1.2 MB, from docs"."""
        return f"{self.num_files} text files, {self.num_bytes / 1e6:.1f} MB, from {self.path}"

    def documents(self) -> Documents:
        """The text of each file. UsageError where one is not UTF-8 further on than its beginning."""
        return (_pieces(file) for file in self._files)

    def read(self, start: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """`length` bytes of the joined corpus from `start` on."""
        pieces = []
        index = bisect_right(self._starts, start) - 1
        while length > 0:
            mapped = self._map(index)
            offset = start - self._starts[index]
            piece = mapped[offset : offset + length]
            pieces.append(piece)
            start, length, index = start + len(piece), length - len(piece), index + 1
        return np.concatenate(pieces)


def stamp(files: Iterable[Path]) -> str:
    """A hash of files' paths, sizes and times of change."""
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


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(4096)
    if b"\0" in head:
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 3 and error.reason == "unexpected end of data"
    return True
