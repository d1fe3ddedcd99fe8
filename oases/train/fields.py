"""The types of a configuration's fields: what may stand in each, and what a value of another type is told."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from typing import Any

from oases.errors import UsageError

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((numbers.Integral,), "a whole number"),
    "float": ((numbers.Real,), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text, or null for none"),
}


def type_fault(item: Field[Any], value: Any) -> str:
    """What is wrong with the type of a field's value, in words; empty where nothing is."""
    kinds, what = _KINDS.get(str(item.type), ((object,), ""))
    fits = isinstance(value, kinds) and (bool in kinds or object in kinds or not isinstance(value, bool))
    return "" if fits else f"{item.name} must be {what}, got {value!r}"


def require_types(config: Any) -> None:
    """Raise UsageError, naming field and value, unless every field of a dataclass holds its type."""
    for item in fields(config):
        fault = type_fault(item, getattr(config, item.name))
        if fault:
            raise UsageError(fault)


def require_known(config: Any, known: Mapping[str, Iterable[str]]) -> None:
    """Raise UsageError unless each field named in `known` holds one of its values."""
    for name, among in known.items():
        if getattr(config, name) not in among:
            raise UsageError(f"unknown {name} {getattr(config, name)!r}; known are {', '.join(among)}")
