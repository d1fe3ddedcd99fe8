"""Text as the tokens of a tokenizer: made once, kept in a file of the user's cache, memory-mapped from there."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oases.errors import UsageError
from oases.parallel.autotune import cache_path
from oases.terminal import console, progress
from oases.train.data import PIECE_CHARACTERS, Corpus, Documents, TextCorpus, stamp
from oases.train.tokenizer import AnyTokenizer, Bytes, require_package

_AT_ONCE = 16 * PIECE_CHARACTERS
"""Characters that the tokenizer is given at once, for its threads."""


class Source(Protocol):
    """Where texts come from, none of them empty. fingerprint: another one for other texts."""

    path: Path
    num_bytes: int

    @property
    def fingerprint(self) -> str: ...  # noqa: D102

    def documents(self) -> Documents: ...  # noqa: D102

    def described(self) -> str: ...  # noqa: D102


class Dataset:
    """A folder that `datasets` saved by `save_to_disk`; of several splits, `train`. column: that holds the text.

    UsageError where the package is not installed, and where the folder or the column cannot be read.
    """

    def __init__(self, path: Path, column: str) -> None:
        library = require_package("datasets", f"data {str(path)!r}", "pip install datasets")
        self.path, self._column = path, column
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
        if column not in found.column_names:
            raise UsageError(
                f"data {str(path)!r} has no column {column!r}; give one of {', '.join(found.column_names)} as "
                "--text-column"
            )
        self._rows = found.select_columns([column])
        self._files = sorted(file for file in path.rglob("*") if file.is_file())
        self.num_bytes = sum(file.stat().st_size for file in self._files)

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a folder looks like one."""
        return (path / "dataset_dict.json").is_file() or all(
            (path / name).is_file() for name in ("dataset_info.json", "state.json")
        )

    @property
    def fingerprint(self) -> str:
        """Of the files: their names, sizes and times of change."""
        return stamp(self._files) + self._column

    def described(self) -> str:
        """E.g. "1000 texts from corpus"."""
        return f"{len(self._rows)} texts from {self.path}"

    def documents(self) -> Documents:
        """The text of each row. UsageError for a row that is no text."""
        for batch in self._rows.iter(batch_size=256):
            for text in batch[self._column]:
                if not isinstance(text, str):
                    raise UsageError(
                        f"data {str(self.path)!r}: column {self._column!r} holds a {type(text).__name__}, no text; "
                        "give the column of the text as --text-column"
                    )
                if text:
                    yield iter((text,))


class TokenCorpus(Corpus):
    """The tokens of a source's texts, one behind the other; behind every text the tokenizer's end of a text.

    They are written to a file of the user's cache by the first process that asks, and found there by the others and
    by later runs with the same files and tokenizer. A file appears when it is whole.
    """

    def __init__(self, source: Source, tokenizer: AnyTokenizer) -> None:
        super().__init__()
        self.path, self._source, self._tokenizer = source.path, source, tokenizer
        kinds = ((2**8, np.uint8), (2**16, np.uint16), (2**32, np.uint32))
        self._kind = np.dtype(next(kind for most, kind in kinds if tokenizer.size <= most))
        key = hashlib.sha256(f"{source.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:32]
        self.file = cache_path().parent / "tokens" / f"{key}.{self._kind.name}"
        """Where the tokens are kept, unsigned integers of the machine's order of bytes."""
        if not self.file.is_file():
            with _alone(self.file):
                if not self.file.is_file():  # another process may have written it meanwhile
                    self._write()
        if not self.file.stat().st_size:
            raise UsageError(f"data {str(self.path)!r} has no tokens; give more text")
        self._tokens = np.memmap(self.file, self._kind, mode="r")
        self.num_tokens = len(self._tokens)

    @property
    def identity(self) -> dict[str, Any]:
        """Number of tokens and the tokenizer's fingerprint."""
        return {"tokens": self.num_tokens, "tokenizer": self._tokenizer.fingerprint}

    def described(self) -> str:
        """E.g. "2.1 million tokens of 3 text files, 8.3 MB, from docs, by gpt2"."""
        return (
            f"{self.num_tokens / 1e6:.2f} million tokens of {self._source.described()}, by {self._tokenizer.name} "
            f"({self._tokenizer.size} tokens)"
        )

    def read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """`length` tokens from `start` on."""
        return self._tokens[start : start + length]

    def _write(self) -> None:
        aside = self.file.with_name(f".{self.file.name}.{os.getpid()}.part")
        try:
            with aside.open("wb") as out, progress("tokenizing, %", 100, not console.quiet) as advance:
                done = shown = 0
                for texts, ends in _gathered(self._source.documents()):
                    for tokens, last in zip(self._tokenizer.encode(texts), ends, strict=True):
                        np.asarray(tokens, self._kind).tofile(out)
                        if last and self._tokenizer.end is not None:
                            np.asarray([self._tokenizer.end], self._kind).tofile(out)
                    done += sum(len(text) for text in texts)
                    while shown < min(99, 100 * done // max(1, self._source.num_bytes)):
                        shown += 1
                        advance(shown)
                advance(100)
                out.flush()
                os.fsync(out.fileno())
            aside.rename(self.file)
        finally:
            aside.unlink(missing_ok=True)


def open_corpus(data: str | None, tokenizer: AnyTokenizer, column: str = "text") -> Corpus:
    """The corpus at `data`: bytes of text files as they are, else tokens. column: of a dataset's texts.

    data: a text file, a folder of them, or a folder that `datasets` saved; None: this Python's standard library.
    UsageError where it cannot be read, or needs what is not installed.
    """
    if data and Dataset.is_at(Path(data)):
        return TokenCorpus(Dataset(Path(data), column), tokenizer)
    text = TextCorpus(data)
    return text if isinstance(tokenizer, Bytes) else TokenCorpus(text, tokenizer)


def _gathered(documents: Documents) -> Iterator[tuple[list[str], list[bool]]]:
    """Pieces of several texts at a time, each with whether it is its text's last."""
    texts: list[str] = []
    ends: list[bool] = []
    waiting = 0
    for document in documents:
        for piece in document:
            if waiting >= _AT_ONCE:
                yield texts, ends
                texts, ends, waiting = [], [], 0
            texts.append(piece)
            ends.append(False)
            waiting += len(piece)
        ends[-1] = True
    if texts:
        yield texts, ends


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """While no other process of this machine is in here for the same file; ranks may ask all at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
