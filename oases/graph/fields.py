"""Reads the fields of a graph's JSON, each of its type; what is wrong is named by its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from oases.errors import UsageError

LARGEST = 10**24
"""Of FLOPs, bytes or features: what is beyond it was mistyped."""
_Made = TypeVar("_Made")


class Record:
    """A JSON object. Each method reads a field of one type; UsageError names the field that is not."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise UsageError(f"graph: {where} must be an object, got {_short(data)}")
        self._data = data
        self._where = where

    def made(self, kind: type[_Made], **values: Any) -> _Made:
        """An instance of `kind`. UsageError where the record holds a field that is none of its values."""
        for name in self._data:
            if name not in values:
                raise UsageError(f"graph: {self._where} has an unknown field {name!r}; known are {', '.join(values)}")
        return kind(**values)

    def text(self, name: str) -> str:
        """A string."""
        value = self._field(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Strings."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of strings", values)
        return tuple(values)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._field(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def count(self, name: str) -> int:
        """A whole number of at least 0."""
        value = self._field(name)
        if not _is_count(value):
            raise self._wrong(name, "a whole number of at least 0", value)
        return int(value)

    def counts(self, name: str) -> tuple[int, ...]:
        """Whole numbers of at least 0."""
        values = self._list(name)
        if not all(map(_is_count, values)):
            raise self._wrong(name, "a list of whole numbers of at least 0", values)
        return tuple(values)

    def shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Lists of whole numbers of at least 0."""
        values = self._list(name)
        if not all(isinstance(value, list) and all(map(_is_count, value)) for value in values):
            raise self._wrong(name, "a list of shapes", values)
        return tuple(map(tuple, values))

    def records(self, name: str, kind: str) -> list[Record]:
        """Objects, each a `kind` of which a mistake is told by its number."""
        return [Record(item, f"{kind} {number}") for number, item in enumerate(self._list(name))]

    def _field(self, name: str) -> Any:
        if name not in self._data:
            raise UsageError(f"graph: {self._where} has no field {name!r}")
        return self._data[name]

    def _list(self, name: str) -> list[Any]:
        value = self._field(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def _wrong(self, name: str, wanted: str, value: Any) -> UsageError:
        return UsageError(f"graph: {self._where}: {name} must be {wanted}, got {_short(value)}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
