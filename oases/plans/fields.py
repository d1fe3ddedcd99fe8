"""Reading of the objects in a plan file, with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from oases.errors import UsageError
from oases.limits import short
from oases.plans.layered import Block, LayeredModel, LayerKind, LayerList, Outside, Share

_LARGEST = 10**24
_T = TypeVar("_T")


def layered_model(data: Any) -> LayeredModel:
    """Parse a model of a plan file. Raises UsageError naming the field that is missing, unknown or wrong."""
    older = {"token_wise": False, "expert_parallel": 0}  # files of before they were searched
    body = _object(older | data if isinstance(data, dict) else data, LayeredModel, "model")
    kinds = [_object(each, LayerKind, f"model: kind {n}") for n, each in enumerate(_list(body, "kinds", "model"))]
    names = ("sequence", "hidden", "unit", "vocabulary", "num_parameters")
    sizes: dict[str, Any] = {name: _count(body[name], f"model: {name}") for name in names}
    return LayeredModel(
        **sizes,
        name=_text(body["name"], "model: name"),
        dtype=_text(body["dtype"], "model: dtype"),
        lists=tuple(_plain(each, LayerList, "model: lists") for each in _list(body, "lists", "model")),
        kinds=tuple(
            LayerKind(_text(kind["name"], "model: kind"), tuple(map(_block, _list(kind, "blocks", "model: kind"))))
            for kind in kinds
        ),
        order=tuple(_count(each, "model: order") for each in _list(body, "order", "model")),
        outside=tuple(_outside(each) for each in _list(body, "outside", "model")),
        messages=tuple(_count(each, "model: messages") for each in _list(body, "messages", "model")),
        token_wise=_flag(body["token_wise"], "model: token_wise"),
        expert_parallel=_count(body["expert_parallel"], "model: expert_parallel"),
    )


def _block(data: Any) -> Block:
    body = _object(data, Block, "model: block")
    shares = tuple(_share(each) for each in _list(body, "shares", "model: block"))
    return Block(
        _text(body["name"], "model: block"), shares, _count(body["combined"], "model: block: combined"),
        _count(body["ops"], "model: block: ops"),
    )  # fmt: skip


def _outside(data: Any) -> Outside:
    body = _object(data, Outside, "model: outside")
    shares = tuple(_share(each) for each in _list(body, "shares", "model: outside"))
    counts = (_count(body[name], f"model: outside: {name}") for name in ("before", "logits", "tied"))
    before, logits, tied = counts
    return Outside(before, shares, logits, tied)


def _share(data: Any) -> Share:
    return _plain({"routed": 0} | data if isinstance(data, dict) else data, Share, "model: share")


def _plain(data: Any, kind: type[_T], where: str) -> _T:
    """Build an instance whose fields are counts, texts and flags."""
    body = _object(data, kind, where)
    of = {"int": _count, "str": _text, "bool": _flag}
    return kind(**{item.name: of[str(item.type)](body[item.name], f"{where}: {item.name}") for item in fields(kind)})  # type: ignore[arg-type]


def _object(data: Any, kind: type[Any], where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise UsageError(f"plan: {where} must be an object, got {short(data)}")
    known = [item.name for item in fields(kind)]
    for name in data:
        if name not in known:
            raise UsageError(f"plan: {where} has an unknown field {short(name)}; known are {', '.join(known)}")
    for name in known:
        if name not in data:
            raise UsageError(f"plan: {where} has no field {name!r}; write the plan anew with: oases plan --json FILE")
    return data


def _list(data: Mapping[str, Any], name: str, where: str) -> list[Any]:
    if not isinstance(data[name], (list, tuple)):
        raise UsageError(f"plan: {where}: {name} must be a list, got {short(data[name])}")
    return list(data[name])


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise UsageError(f"plan: {where} must be a whole number of at least 0, got {short(value)}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"plan: {where} must be a text, got {short(value)}")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"plan: {where} must be true or false, got {short(value)}")
    return value


def listed(data: Any, name: str, where: Any) -> list[Any]:
    """List in a field of a plan's data. Raises UsageError naming the object by `where`."""
    if not isinstance(data, dict) or not isinstance(data.get(name), list):
        raise UsageError(f"plan: {where} has no list {name!r}")
    found: list[Any] = data[name]
    return found


def made(cls: type[Any], data: Any, where: str) -> Any:
    """Build a dataclass from a mapping, checking the names and types of its fields."""
    if not isinstance(data, Mapping):
        raise UsageError(f"plan: {where} must be an object, got {short(data)}")
    known = {item.name: item for item in fields(cls)}
    for name in data:
        if name not in known:
            raise UsageError(f"plan: {where} has an unknown field {short(name)}; known are {', '.join(known)}")
    plain: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "bool": (bool,), "float": (int, float)}
    for name, value in data.items():
        wanted = plain.get(str(known[name].type))
        if wanted and (not isinstance(value, wanted) or (bool not in wanted and isinstance(value, bool))):
            raise UsageError(f"plan: {where}: {name} must be {known[name].type}, got {short(value)}")
    try:
        return cls(**data)
    except TypeError as error:  # missing field: Python's message names it
        raise UsageError(f"plan: {where}: {error}") from error
