"""Text as training data: every text file under a path, bytes as tokens, memory-mapped.

The corpus is cut into blocks of 64 KiB; every twentieth is held out for validation. A sample is a window that
lies in one block, so no training window touches a held-out byte. Which window: a pure function of seed and step.
"""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oases.errors import UsageError

BLOCK_BYTES = 65_536
HOLD_OUT_EVERY = 20
VOCABULARY = 256


def standard_library() -> Path:
    """Where this Python keeps the source of its standard library: text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


class TextCorpus:
    """All text files under `path` (default: the Python standard library's source), joined in order of name.

    A file is text if its beginning holds no NUL byte and decodes as UTF-8. Raises UsageError for a path that is
    missing, unreadable, empty, or holds no text.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
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
        self.skipped = dict(skipped)
        if not self._files:
            why = ", ".join(f"{count} {what}" for what, count in skipped.items())
            what = (
                f"is {next(iter(skipped))}" if self.path.is_file() else f"holds no text file ({why or 'it is empty'})"
            )
            raise UsageError(f"data {str(self.path)!r} {what}; give a text file or a folder of them")
        # Each worker process maps files by itself; open ones are few, so that no limit on descriptors is hit.
        self._map = lru_cache(maxsize=64)(lambda index: np.memmap(self._files[index], np.uint8, mode="r"))
        self._windows = lru_cache(maxsize=8)(self._blocks)

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

    def batch(self, *, split: str, step: int, batch: int, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch, sequence] each, targets one byte ahead.

        split: "train" or "validation". Equal arguments give equal batches, on any rank.
        Raises UsageError where the split has no window of sequence + 1 bytes.
        """
        window = sequence + 1
        blocks = self._windows(split, window)
        if not blocks:
            raise UsageError(
                f"data {str(self.path)!r} has {self.num_bytes} bytes, too few for a {split} window of "
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
        size = min(BLOCK_BYTES, max(self.num_bytes // HOLD_OUT_EVERY, 1))
        size = max(size, window)  # a small corpus in 20 blocks, a long window in one of its own
        blocks = []
        for index, start in enumerate(range(0, self.num_bytes, size)):
            held_out = index % HOLD_OUT_EVERY == HOLD_OUT_EVERY // 2
            end = min(start + size, self.num_bytes)
            if held_out == (split == "validation") and end - start >= window:
                blocks.append((start, end))
        return blocks


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
