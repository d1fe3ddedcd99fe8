"""Records: dataclasses read from the data of a JSON or YAML file, with every field checked, and written as such.

A field's type says what it may hold: int, float, bool, str, None, tuples, lists, mappings and dataclasses of these,
and unions. `Annotated` adds a `Number`, `OneOf`, `Name` or `Inline`. A number without its own limits has those of
its field's name in `oases.limits`. A field with a default may be missing; one with the metadata in_files=False is
not in files.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from oases.errors import UsageError
from oases.limits import fault, short

_T = TypeVar("_T")
_LARGEST = 2**64 - 1
_UNITS = ("_ms", "_us", "_milliseconds", "_mib", "_gib", "_gb", "_gbps")
"""Suffixes of fields in another unit than a record's."""


@dataclass(frozen=True)
class Number:
    """Limits of a number. unit: what it counts. above: what it must exceed.

    usual: (smallest, largest, hint): of values but 0, beyond which only another unit would explain one.
    """

    unit: str = ""
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    usual: tuple[float, float, str] = (-math.inf, math.inf, "")

    def fault(self, value: float) -> str:
        """Continuation of an error message; empty for a number within the limits."""
        if value <= self.above:
            return f"must be above {self.above:g}, got {short(value)}"
        if value < self.least:
            return f"must be at least {self.least:g}, got {short(value)}"
        if value > self.most:
            return f"must be at most {self.most:g}, got {short(value)}"
        least, most, hint = self.usual
        if value and not least <= value <= most:
            bound = f"below {least:g}" if value < least else f"above {most:g}"
            return f"is {short(value)}, {bound}; the unit is {self.unit}, {hint}"
        return ""


@dataclass(frozen=True)
class Name:
    """Name of a field in files, where it is another than the attribute's."""

    name: str


@dataclass(frozen=True)
class Within:
    """Object in which a field stands in files, beside others of the record."""

    group: str


@dataclass(frozen=True)
class Inline:
    """Fields of a dataclass that stand among those of the record that holds it, with a suffix."""

    suffix: str = ""


@dataclass(frozen=True)
class OneOf:
    """Values that a text may have."""

    known: tuple[str, ...]

    def fault(self, value: str) -> str:
        """Continuation of an error message; empty for a known value."""
        return "" if value in self.known else f"is {short(value)}; known are {', '.join(self.known)}"


@dataclass(frozen=True)
class Check:
    """Check of a value by a function, which returns the rest of an error message, or nothing."""

    fault: Callable[[Any], str]


class _Field:
    """Field of a record as it stands in files. name: there; attribute: of the dataclass."""

    def __init__(self, item: dataclasses.Field[Any], hint: Any) -> None:
        self.attribute, self.name = item.name, item.name
        self.hint, self.notes = _stripped(hint)
        self.required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        self.inline: str | None = None
        self.group = ""
        for note in self.notes:
            if isinstance(note, Name):
                self.name = note.name
            elif isinstance(note, Inline):
                self.inline = note.suffix
            elif isinstance(note, Within):
                self.group = note.group


def _stripped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without `Annotated`, and what that adds."""
    return (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())


_known: dict[Any, tuple[_Field, ...]] = {}


def _fields(kind: Any) -> tuple[_Field, ...]:
    """Fields of a dataclass, looked up once."""
    if kind not in _known:
        hints = get_type_hints(kind, include_extras=True)
        _known[kind] = tuple(
            _Field(each, hints[each.name]) for each in fields(kind) if each.metadata.get("in_files", each.init)
        )
    return _known[kind]


def names_of(kind: type[Any], suffix: str = "") -> list[str]:
    """Names of a record's fields in files, in their order."""
    found: dict[str, None] = {}
    for item in _fields(kind):
        names = [item.group or item.name + suffix] if item.inline is None else names_of(item.hint, item.inline)
        found |= dict.fromkeys(names)
    return list(found)


def body(data: Any, form: str, version: int, where: str, remedy: str, what: str = "") -> dict[str, Any]:
    """Fields of a file besides its format and version. UsageError, ending with the remedy, for another file.

    what: name of such a file in errors; "": an `form`.
    """
    if not isinstance(data, Mapping) or data.get("format") != form:
        raise UsageError(f"{where} is not {what or f'an {form}'}; {remedy}")
    if data.get("version") != version:
        raise UsageError(
            f"{where}: version {short(data.get('version'))} is unknown; this oases reads version {version}: {remedy}"
        )
    return {name: value for name, value in data.items() if name not in ("format", "version")}


def read(kind: type[_T], data: Any, where: str, remedy: str) -> _T:
    """Make a record of data. UsageError that names the field by `where`, and ends with a remedy where one is missing.

    An unknown field is an error that names the nearest known one.
    """
    _require_known(data, names_of(kind), where)
    groups = [item.group for item in _fields(kind) if item.group]
    for group in groups:
        if group in data:
            _require_known(
                data[group], [item.name for item in _fields(kind) if item.group == group], f"{where}: {group}"
            )
    return _made(kind, data, where, remedy)


def _require_known(data: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where} must be an object, got {short(data)}")
    for name in data:
        if name not in known:
            raise UsageError(f"{where}: {unknown(name, known)}")


def _made(kind: type[_T], data: Mapping[str, Any], where: str, remedy: str, suffix: str = "") -> _T:
    values: dict[str, Any] = {}
    for item in _fields(kind):
        name, at = item.name + suffix, f"{where}: {item.group}" if item.group in data else where
        given = data.get(item.group, data)
        if item.inline is not None:
            values[item.attribute] = _made(item.hint, data, where, remedy, item.inline)
        elif item.group and item.group not in data:
            raise UsageError(f"{where}: field {item.group!r} is missing; {remedy}")
        elif name in given:
            values[item.attribute] = _value(item.hint, item.notes, given[name], f"{at}: {name}", name, remedy)
        elif item.required:
            raise UsageError(f"{at}: field {name!r} is missing; {remedy}")
    try:
        return kind(**values)
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith(where) else f"{where}: {text}") from error


def unknown(name: object, known: Sequence[str], otherwise: str = "") -> str:
    """Error message for an unknown field, with the nearest known one; otherwise: where to find all."""
    stem = str(name)
    for unit in _UNITS:
        stem = stem.removesuffix(unit)
    near = [each for each in known if each.removesuffix("_seconds") == stem]
    near = near or difflib.get_close_matches(str(name), known, n=1)
    if not near:
        return f"unknown field {short(name)}; {otherwise or 'known are ' + ', '.join(known)}"
    in_seconds = near[0].endswith("_seconds") and not near[0].endswith("per_second")
    return f"unknown field {short(name)}; did you mean {near[0]!r}?{' (times are in seconds)' * in_seconds}"


def check(record: Any, where: str = "") -> None:
    """Raise UsageError, with field and value, unless every field of a dataclass has its type and its limits.

    where: before the field's name.
    """
    for item in _fields(type(record)):
        require(type(record), item.attribute, getattr(record, item.attribute), where + item.name)


def require(kind: type[Any], attribute: str, value: Any, where: str) -> None:
    """Raise UsageError, which begins with `where`, unless a value is one of this field."""
    item = next(each for each in _fields(kind) if each.attribute == attribute)
    _value(item.hint, item.notes, value, where, item.name, "")


def _value(hint: Any, notes: Sequence[Any], value: Any, where: str, name: str, remedy: str) -> Any:
    """A checked value. name: of the field, for its limits. UsageError begins with `where`."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in choices:
        return None
    nullable, choices = type(None) in choices, tuple(each for each in choices if each is not type(None))
    of_records: tuple[Any, ...] = tuple(each for each in choices if dataclasses.is_dataclass(each))
    if of_records:
        return value if isinstance(value, of_records) else one_of(of_records, value, where, remedy, nullable=nullable)
    if len(choices) > 1:
        return _any_of(choices, value, where)
    hint, more = _stripped(choices[0])
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        return _sequence(origin, inner[0], value, where, remedy)
    if origin in (Mapping, dict):
        return _mapping(inner, value, where, remedy)
    return _number_or_text(hint, (*notes, *more), value, where, name, nullable) if hint in _PLAIN else value


def one_of(kinds: Sequence[Any], value: Any, where: str, remedy: str, *, nullable: bool = False) -> Any:
    """Make a record of one of these kinds: of several, the one that has most of the given fields."""
    if nullable and not isinstance(value, Mapping):
        raise UsageError(f"{where} must be an object or null, got {short(value)}")
    given = {*value} if isinstance(value, Mapping) else set[str]()
    return read(max(kinds, key=lambda each: len({*names_of(each)} & given)), value, where, remedy)


def _any_of(choices: Sequence[Any], value: Any, where: str) -> Any:
    """A value of one of several plain types."""
    kinds = [_PLAIN[each] for each in choices if each in _PLAIN]
    if not any(isinstance(value, kind) for kind, _ in kinds):
        raise UsageError(f"{where} must be {' or '.join(what for _, what in kinds)}, got {short(value)}")
    return value


def _sequence(kind: Callable[[Any], Any], inner: Any, value: Any, where: str, remedy: str) -> Any:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where} must be a list, got {short(value)}")
    return kind(_value(*_stripped(inner), each, f"{where}[{n}]", "", remedy) for n, each in enumerate(value))


def _mapping(inner: Sequence[Any], value: Any, where: str, remedy: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be an object, got {short(value)}")
    key, kind = map(_stripped, inner)
    return {
        _value(*key, each, f"{where}: a name", "", remedy): _value(*kind, found, f"{where}: {each}", "", remedy)
        for each, found in value.items()
    }


_PLAIN: dict[Any, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
}


def _number_or_text(
    kind: type, notes: Sequence[Any], value: Any, where: str, name: str, nullable: bool = False
) -> Any:
    limits = next((note for note in notes if isinstance(note, Number)), None)
    of, what = _PLAIN[kind]
    unit = f" of {limits.unit}" if limits is not None and limits.unit else ""
    fits: bool = isinstance(value, of) and not (isinstance(value, bool) and kind is not bool)
    if not fits:
        raise UsageError(f"{where} must be {what}{unit}{', or null for none' * nullable}, got {short(value)}")
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{where} must be a text without null characters, got {short(value)}")
    if limits is None and (wrong := fault(name, value, where)):
        raise UsageError(wrong)
    if kind is int and not -_LARGEST <= value <= _LARGEST:  # JSON has whole numbers of any length
        raise UsageError(f"{where} must be below 2^64, got {short(value)}")
    if kind is float and not -sys.float_info.max <= value <= sys.float_info.max:
        raise UsageError(f"{where} must be finite, got {short(value)}")
    if limits is not None and (wrong := limits.fault(value)):
        raise UsageError(f"{where} {wrong}")
    for note in notes:
        if isinstance(note, Check | OneOf) and (wrong := note.fault(value)):
            raise UsageError(f"{where} {wrong}")
    return float(value) if kind is float else value


def plain(record: Any, suffix: str = "") -> dict[str, Any]:
    """Data of a record for a file: what `read` makes it of."""
    found: dict[str, Any] = {}
    for item in _fields(type(record)):
        value = getattr(record, item.attribute)
        if item.inline is not None:
            found |= plain(value, item.inline)
        elif item.group:
            found.setdefault(item.group, {})[item.name] = _data(value)
        else:
            found[item.name + suffix] = _data(value)
    return found


def _data(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, tuple | list):
        return [_data(each) for each in value]
    return {name: _data(each) for name, each in value.items()} if isinstance(value, Mapping) else value
