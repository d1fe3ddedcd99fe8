"""Tokenized corpora: tokenized once, cached in a file of the user's cache, memory-mapped from there."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from oases.core.execution.autotune import cache_path
from oases.errors import UsageError
from oases.terminal import console, progress
from oases_train.data import PIECE_CHARACTERS, Corpus, Documents, TextCorpus, stamp
from oases_train.tokenizer import AnyTokenizer, Bytes, require_package

_AT_ONCE = 16 * PIECE_CHARACTERS
"""Characters per tokenizer call: enough to use all its threads."""
_COLUMN = "text"
"""Column of a dataset with the text."""


class Dataset:
    """Dataset saved by `save_to_disk` of `datasets`: its column `text`, of its `train` split if it has splits.

    UsageError where the package is not installed, and where the folder or the column cannot be read.
    """

    def __init__(self, path: Path) -> None:
        library = require_package("datasets", f"data {str(path)!r}", "pip install datasets")
        self.path = path
        try:
            found = library.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise UsageError(f"data {str(path)!r}: datasets cannot load it: {error}") from error
        if isinstance(found, dict):
            if "train" not in found:
                raise UsageError(
                    f"data {str(path)!r} has the splits {', '.join(found)}, and no train; give the folder of one"
                )
            found = found["train"]
        if _COLUMN not in found.column_names:
            raise UsageError(
                f"data {str(path)!r} has no column {_COLUMN!r}; rename one of {', '.join(found.column_names)} to it "
                "(rename_column of datasets), and save it again"
            )
        self._rows = found.select_columns([_COLUMN])
        self.files = sorted(file for file in path.rglob("*") if file.is_file())
        self.description = f"{len(self._rows)} texts from {path}"

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a folder holds a saved dataset."""
        return (path / "dataset_dict.json").is_file() or all(
            (path / name).is_file() for name in ("dataset_info.json", "state.json")
        )

    def documents(self) -> Documents:
        """Text of each row. UsageError for a row that is not text."""
        for batch in self._rows.iter(batch_size=256):
            for text in batch[_COLUMN]:
                if not isinstance(text, str):
                    raise UsageError(
                        f"data {str(self.path)!r}: column {_COLUMN!r} holds a {type(text).__name__}, not text; "
                        "rename the column with the text to it (rename_column of datasets)"
                    )
                if text:
                    yield iter((text,))


class TokenCorpus(Corpus):
    """Tokens of a source's texts, concatenated, each text followed by the tokenizer's end-of-text token.

    The first process writes them to a file in the user's cache; other processes, and later runs with the same files
    and tokenizer, read it. The file appears by a rename, once complete.
    """

    def __init__(self, source: TextCorpus | Dataset, tokenizer: AnyTokenizer) -> None:
        super().__init__()
        self.path, self._source, self._tokenizer = source.path, source, tokenizer
        kinds = ((2**8, np.uint8), (2**16, np.uint16), (2**32, np.uint32))
        self._kind = np.dtype(next(kind for most, kind in kinds if tokenizer.size <= most))
        texts = stamp(source.files) + (_COLUMN if isinstance(source, Dataset) else "")
        key = hashlib.sha256(f"{texts} {tokenizer.fingerprint}".encode()).hexdigest()[:32]
        self.file = cache_path().parent / "tokens" / f"{key}.{self._kind.name}"
        """Cache file of the tokens, unsigned integers in native byte order."""
        if not self.file.is_file():
            try:
                with _locked(self.file):
                    if not self.file.is_file():  # another process may have written it meanwhile
                        self._write()
            except OSError as error:
                raise UsageError(
                    f"tokens of data {str(self.path)!r} cannot be written to {str(self.file)!r}: {error}; set "
                    "OASES_CACHE to a file in another folder"
                ) from error
        if not self.file.stat().st_size:
            raise UsageError(f"data {str(self.path)!r} has no tokens; give more text")
        self._tokens = np.memmap(self.file, self._kind, mode="r")
        self.num_tokens = len(self._tokens)
        self.identity = {"tokens": self.num_tokens, "tokenizer": tokenizer.fingerprint}
        self.description = (
            f"{self.num_tokens / 1e6:.2f} million tokens of {source.description}, by {tokenizer.name} "
            f"({tokenizer.size} tokens)"
        )

    def read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """Read tokens start to start + length, unsigned integers [length]."""
        return self._tokens[start : start + length]

    def _write(self) -> None:
        aside = self.file.with_name(f".{self.file.name}.part")  # of one process at a time, under the lock
        end = [] if self._tokenizer.end is None else [self._tokenizer.end]
        size = max(1, sum(file.stat().st_size for file in self._source.files))
        try:
            with aside.open("wb") as out, progress("tokenizing, %", 100, not console.quiet) as advance:
                done = 0
                for texts, ends in _batched(self._source.documents()):
                    for tokens, last in zip(self._tokenizer.encode(texts), ends, strict=True):
                        np.asarray(tokens, self._kind).tofile(out)
                        np.asarray(end * last, self._kind).tofile(out)
                    done += sum(len(text) for text in texts)
                    advance(min(99, 100 * done // size))
                advance(100)
                out.flush()
                os.fsync(out.fileno())
            aside.rename(self.file)
        finally:
            aside.unlink(missing_ok=True)


def open_corpus(data: str | None, tokenizer: AnyTokenizer) -> Corpus:
    """Open the corpus at `data`.

    data: a text file, a folder of them, or a saved dataset; None: this Python's standard library. UsageError where it
    cannot be read, or needs a package that is not installed.
    """
    if data and Dataset.is_at(Path(data)):
        return TokenCorpus(Dataset(Path(data)), tokenizer)
    text = TextCorpus(data)
    return text if isinstance(tokenizer, Bytes) else TokenCorpus(text, tokenizer)


def _batched(documents: Documents) -> Iterator[tuple[list[str], list[bool]]]:
    """Batch pieces of texts; for each piece, whether it is the last of its text."""
    texts: list[str] = []
    ends: list[bool] = []
    characters = 0
    for document in documents:
        for piece in document:
            if characters >= _AT_ONCE:
                yield texts, ends
                texts, ends, characters = [], [], 0
            texts.append(piece)
            ends.append(False)
            characters += len(piece)
        ends[-1] = True
    if texts:
        yield texts, ends


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an inter-process lock for `file`: all ranks of a machine may open the corpus at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
