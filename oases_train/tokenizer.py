"""Tokenizers: bytes, a local tokenizer.json, or a Hugging Face tokenizer by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from oases.errors import UsageError
from oases.files import read_json, read_text
from oases.models.options import BYTES

_FILE = "tokenizer.json"
_MOST_BYTES = 2**29


class Bytes:
    """Byte-level tokenizer: every UTF-8 byte is a token; documents end with a line break."""

    name = fingerprint = "bytes"
    size = BYTES
    end: int | None = 10

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Tokens of each text, array-like."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]


class Tokenizer:
    """Tokenizer of the `tokenizers` library.

    name: for messages. size: largest token plus one, special tokens included. end: end-of-text token, appended to
    every document; None if the tokenizer has none. Truncation and padding, which files of tokenizers may ask for, are
    turned off in `inner`: they are of a model's inputs, not of texts.
    """

    def __init__(self, inner: Any, name: str, end: str | None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name = name
        known: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        if not known:
            raise UsageError(f"tokenizer {name!r} has no tokens; train it first, or give another")
        self.size = max(known.values()) + 1
        self.end = None if end is None else known.get(end)

    @property
    def fingerprint(self) -> str:
        """Hash of the whole tokenizer; equal for equal tokenizations."""
        return hashlib.sha256(f"{self._inner.to_str()} {self.end}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Tokens of each text, array-like, without special tokens."""
        return [found.ids for found in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]


AnyTokenizer = Bytes | Tokenizer


@lru_cache(maxsize=4)
def load_tokenizer(name: str | None) -> AnyTokenizer:
    """Load a tokenizer from a path or by Hugging Face name; None: bytes.

    A path is a tokenizer.json or a folder with one, read offline by the `tokenizers` library; the end-of-text token
    is the `eos_token` of a tokenizer_config.json beside it. Any other name goes to transformers' AutoTokenizer, which
    downloads it or finds it in its cache. UsageError where it is missing or cannot be read, and with the pip command
    where the library is not installed.
    """
    if name is None:
        return Bytes()
    path = Path(name)
    if not name:
        raise UsageError("tokenizer '' is empty; give a tokenizer.json, a folder with one, or a name")
    if path.is_file() or (path / _FILE).is_file():
        return _of_file(path if path.is_file() else path / _FILE, name)
    if path.suffix == ".json" or path.is_absolute() or name.startswith("."):
        what = f"folder has no {_FILE}" if path.is_dir() else "path does not exist"
        raise UsageError(f"tokenizer {name!r}: the {what}; give a {_FILE}, a folder with one, or a name")
    return _of_hub(name)


def require_rows(tokenizer: AnyTokenizer, rows: int, what: str, remedy: str) -> None:
    """Raise UsageError for a tokenizer with more tokens than an embedding has rows. what: opens the message."""
    if tokenizer.size > rows:
        raise UsageError(f"{what} {rows} is too small; {tokenizer.name} has {tokenizer.size} tokens; {remedy}")


def require_package(name: str, what: str, command: str) -> Any:
    """Import the module `name`. UsageError with the pip command where it is not installed. what: needs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(f"{what} needs the package {name!r} ({error}); install it: {command}") from error


def _of_file(file: Path, name: str) -> Tokenizer:
    library = require_package("tokenizers", f"tokenizer {name!r}", "pip install tokenizers")
    text = read_text(file, "tokenizer", f"give a {_FILE}", _MOST_BYTES)
    try:
        inner = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"tokenizer {str(file)!r} is not a file of the tokenizers library: {error}") from error
    return Tokenizer(inner, name, _end_beside(file))


def _end_beside(file: Path) -> str | None:
    """Read `eos_token` from the tokenizer_config.json in the same folder; None without."""
    beside = file.with_name("tokenizer_config.json")
    if not beside.is_file():
        return None
    found = read_json(beside, "tokenizer configuration", "fix or delete it", strict=False)
    if not isinstance(found, dict):
        raise UsageError(f"{str(beside)!r} is not a JSON object; fix or delete it")
    said = found.get("eos_token")
    said = said.get("content") if isinstance(said, dict) else said
    return said if isinstance(said, str) else None


def _of_hub(name: str) -> Tokenizer:
    library = require_package("transformers", f"tokenizer {name!r}", "pip install 'transformers>=5.23,<6'")
    try:
        found = library.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"tokenizer {name!r}: transformers cannot load it: {first}; give a {_FILE}, a folder with one, or the "
            "name of one that can be downloaded"
        ) from error
    inner = getattr(found, "backend_tokenizer", None)
    if inner is None:
        raise UsageError(f"tokenizer {name!r} has no {_FILE}, only slow Python code; convert it first")
    return Tokenizer(inner, name, found.eos_token)
