"""Fields of a hardware profile: their checks, units and error messages."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from oases.core.dtypes import QUANTISED
from oases.errors import UsageError
from oases.limits import short
from oases.plans.shape import ELEMENT_BYTES, KINDS
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock, MeasuredOverhead
from oases.simulator.links import COLLECTIVES, LinkModel, Sample
from oases.simulator.program import Contention

FORMAT = "oases hardware"
VERSION = 1
_HOUR = 3600.0

Check = Callable[[Any, str], Any]
"""Check of a value: returns it, or raises UsageError. The text names the field in the file."""


@dataclass(frozen=True)
class _Field:
    """Field of an object in the file. default: value if it is missing; `_REQUIRED` if it must be given."""

    check: Check
    default: Any = None


_REQUIRED = object()


def hardware_of(data: Any, where: str) -> Hardware:
    """Parse the data of a profile. Raises UsageError with the field and the remedy."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"{where} is not a hardware profile; write one with: oases profile --json FILE")
    if data.get("version") != VERSION:
        raise UsageError(
            f"{where}: version {short(data.get('version'))} is unknown; this oases reads version {VERSION}: measure "
            "again with oases profile, or update oases"
        )
    body = {key: value for key, value in data.items() if key not in ("format", "version")}
    return _hardware(body, where)


# --- values ---


def _number(value: Any, where: str, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{where} must be a number of {unit}, got {short(value)}")
    # Whole numbers of any length are JSON.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise UsageError(f"{where} must be finite, got {short(value)}")
    return float(value)


def _seconds(*, above_zero: bool) -> Check:
    def check(value: Any, where: str) -> float:
        number = _number(value, where, "seconds")
        if number < 0 or (above_zero and number == 0):
            raise UsageError(f"{where} must be {'above' if above_zero else 'at least'} 0, got {short(value)}")
        if number > _HOUR:
            raise UsageError(f"{where} is {short(value)}, over an hour; the unit is seconds, not milliseconds")
        return number

    return check


def _rate(unit: str, least: float, hint: str) -> Check:
    def check(value: Any, where: str) -> float:
        number = _number(value, where, unit)
        if number <= 0:
            raise UsageError(f"{where} must be above 0, got {short(value)}")
        if number < least:
            raise UsageError(f"{where} is {short(value)}, below {least:g}; the unit is {unit}, {hint}")
        return number

    return check


def _whole(least: int = 1, unit: str = "") -> Check:
    def check(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            of = f" of {unit}" if unit else ""
            raise UsageError(f"{where} must be a whole number{of} of at least {least}, got {short(value)}")
        if value >= 2**63:
            raise UsageError(f"{where} must be below 2^63, got {short(value)}")
        return value

    return check


def _memory(value: Any, where: str) -> int:
    number: int = _whole(unit="bytes")(value, where)
    if number < 1 << 20:
        raise UsageError(f"{where} is {short(value)}, below a mebibyte; the unit is bytes, not gigabytes")
    return number


def _samples(value: Any, where: str) -> float:
    number = _number(value, where, "samples")
    if number <= 0:
        raise UsageError(f"{where} must be above 0, got {short(value)}")
    return number


def _slowdown(value: Any, where: str) -> float:
    number = _number(value, where, "times as long")
    if number < 1:
        raise UsageError(f"{where} must be at least 1 (no slowdown), got {short(value)}")
    return number


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a text, got {short(value)}")
    return value


def _one_of(*known: str) -> Check:
    def check(value: Any, where: str) -> str:
        if value not in known:
            raise UsageError(f"{where} is {short(value)}; known are {', '.join(known)}")
        return str(value)

    return check


def _flops(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise UsageError(
            f"{where} must be an object from dtype to FLOP/s, such as {{'float32': 1e13}}, got {short(value)}"
        )
    rate = _rate("FLOP/s", 1e6, "not TFLOP/s")
    return {_DTYPE(name, f"{where}: a dtype"): rate(number, f"{where}: {name}") for name, number in value.items()}


def _packing(value: Any, where: str) -> float:
    """Rate of quantising; 0: unknown. Older profiles hold one by code, of which only int8's is used."""
    if isinstance(value, Mapping):
        for name in value:
            _one_of(QUANTISED, "fp8", "int4")(name, f"{where}: a wire dtype")
        value = value.get(QUANTISED, 0)
    return 0.0 if value == 0 else _BYTES_PER_SECOND(value, where)


# --- objects ---

_DTYPE = _one_of(*ELEMENT_BYTES)
_TRACED = re.compile(r"\S+ (block|embedding|head), \d+ FLOPs, \d+ bytes, \d+ parameters")


def _kind(value: Any, where: str) -> str:
    """Kind of a GPT's block, or the name of a traced model's block or end."""
    traced = isinstance(value, str) and _TRACED.fullmatch(value) is not None
    return str(value) if traced else _one_of(*KINDS)(value, where)


_BYTES_PER_SECOND = _rate("bytes per second", 1e3, "not GB/s or Gbit/s")
_SHAPE = {
    "hidden": _Field(_whole(), _REQUIRED),
    "heads": _Field(_whole(), _REQUIRED),
    "sequence": _Field(_whole(), _REQUIRED),
    "dtype": _Field(_DTYPE, _REQUIRED),
    "tp": _Field(_whole(), _REQUIRED),
    "samples": _Field(_samples, _REQUIRED),
}
_SOMETIMES_NOTHING = ("combine", "combine_backward", "weight_gradient")
"""Times that may be zero: published figures do not separate them."""
_BLOCK = {
    "kind": _Field(_kind, _REQUIRED),
    **_SHAPE,
    **{
        f"{item.name}_seconds": _Field(_seconds(above_zero=item.name not in _SOMETIMES_NOTHING), _REQUIRED)
        for item in fields(BlockTimes)
    },
}
_OVERHEAD = {
    **_SHAPE,
    "layers": _Field(_whole(), _REQUIRED),
    "sub_batches": _Field(_whole(), _REQUIRED),
    "forward_seconds": _Field(_seconds(above_zero=False), _REQUIRED),
    "backward_seconds": _Field(_seconds(above_zero=False), _REQUIRED),
}


def _object(value: Any, where: str, known: Mapping[str, _Field]) -> dict[str, Any]:
    """Fields of an object, checked. Raises UsageError for missing and unknown ones, with a suggestion."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be an object, got {short(value)}")
    for name in value:
        if name not in known:
            raise UsageError(f"{where}: unknown field {short(name)}; {_meant(str(name), known)}")
    for name, field in known.items():
        if name not in value and field.default is _REQUIRED:
            raise UsageError(f"{where}: field {name!r} is missing; add it, or measure with oases profile")
    return {
        name: field.check(value[name], f"{where}: {name}") if name in value else field.default
        for name, field in known.items()
    }


def _meant(name: str, known: Mapping[str, Any]) -> str:
    stem = name
    for unit in ("_ms", "_us", "_milliseconds", "_mib", "_gib", "_gb", "_gbps"):
        stem = stem.removesuffix(unit)
    near = [other for other in known if other.removesuffix("_seconds") == stem]
    near = near or difflib.get_close_matches(name, list(known), n=1)
    if not near:
        return f"known are {', '.join(known)}"
    units = " (times are in seconds)" if near[0].endswith("_seconds") and not near[0].endswith("per_second") else ""
    return f"did you mean {near[0]!r}?{units}"


def _list_of(make: Check) -> Check:
    def check(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise UsageError(f"{where} must be a list, got {short(value)}")
        return tuple(make(item, f"{where}[{number}]") for number, item in enumerate(value))

    return check


def _block(value: Any, where: str) -> MeasuredBlock:
    found = _object(value, where, _BLOCK)
    times = BlockTimes(**{item.name: found.pop(f"{item.name}_seconds") for item in fields(BlockTimes)})
    _require_cut(found, where)
    return MeasuredBlock(**found, times=times)


def _overhead(value: Any, where: str) -> MeasuredOverhead:
    found = _object(value, where, _OVERHEAD)
    return MeasuredOverhead(**{name.removesuffix("_seconds"): item for name, item in found.items()})


def _require_cut(block: Mapping[str, Any], where: str) -> None:
    if block["kind"] not in KINDS:
        return  # of a traced model, whose heads need not divide its width
    if block["hidden"] % block["heads"] or block["heads"] % block["tp"]:
        raise UsageError(
            f"{where}: hidden {block['hidden']} in {block['heads']} heads over tp {block['tp']} does not divide; one "
            "of the three is wrong"
        )


def _sample(value: Any, where: str) -> Sample:
    known = {
        "collective": _Field(_one_of(*COLLECTIVES), _REQUIRED),
        "ranks": _Field(_whole(2), _REQUIRED),
        "bytes": _Field(_whole(unit="bytes"), _REQUIRED),
        "seconds": _Field(_seconds(above_zero=True), _REQUIRED),
    }
    return Sample(**_object(value, where, known))


def _contention(value: Any, where: str) -> Contention:
    known = {"compute_slowdown": _Field(_slowdown, 1.0), "link_slowdown": _Field(_slowdown, 1.0)}
    found = _object(value, where, known)
    return Contention(found["compute_slowdown"], found["link_slowdown"])


def _link(value: Any, where: str) -> LinkModel:
    known = {
        "startup_seconds": _Field(_seconds(above_zero=False), _REQUIRED),
        "bytes_per_second": _Field(_BYTES_PER_SECOND, _REQUIRED),
        "contention": _Field(_contention, Contention()),
        "samples": _Field(_list_of(_sample), ()),
    }
    return LinkModel(**_object(value, where, known))


def _device(value: Any, where: str) -> Device:
    known = {
        "name": _Field(_text, _REQUIRED),
        "memory_bytes": _Field(_memory, _REQUIRED),
        "flops_per_second": _Field(_flops, _REQUIRED),
        "bytes_per_second": _Field(_BYTES_PER_SECOND, _REQUIRED),
        "launch_seconds": _Field(_seconds(above_zero=False), 0.0),
        "update_seconds": _Field(_seconds(above_zero=False), 0.0),
        "packing_bytes_per_second": _Field(_packing, 0.0),
    }
    return Device(**_object(value, where, known))


def _links(value: Any, where: str) -> dict[str, Any]:
    return _object(value, where, {"node": _Field(_link, _REQUIRED), "cluster": _Field(_link, _REQUIRED)})


def _hardware(value: Any, where: str) -> Hardware:
    known = {
        "name": _Field(_text, _REQUIRED),
        "about": _Field(_text, ""),
        "date": _Field(_text, ""),
        "device": _Field(_device, _REQUIRED),
        "ranks_per_node": _Field(_whole(), _REQUIRED),
        "links": _Field(_links, _REQUIRED),
        "blocks": _Field(_list_of(_block), ()),
        "overheads": _Field(_list_of(_overhead), ()),
    }
    found = _object(value, where, known)
    links = found.pop("links")
    hardware = Hardware(**found, node=links["node"], cluster=links["cluster"])
    require_distinct(hardware, where)
    return hardware


def require_distinct(hardware: Hardware, where: str) -> None:
    """Raise UsageError for a duplicate block or overhead."""
    seen: set[tuple[Any, ...]] = set()
    for block in hardware.blocks:
        if block.key in seen:
            raise UsageError(
                f"{where}: blocks has two {block.kind} blocks of hidden {block.hidden}, {block.heads} heads, "
                f"sequence {block.sequence}, {block.dtype}, tp {block.tp}, {block.samples:g} samples; leave one out"
            )
        seen.add(block.key)
    for each in hardware.overheads:
        if each.key in seen:
            raise UsageError(
                f"{where}: overheads has two of hidden {each.hidden}, {each.heads} heads, sequence {each.sequence}, "
                f"{each.dtype}, tp {each.tp}, {each.layers} layers, {each.samples:g} samples in {each.sub_batches} "
                "sub-batches; leave one out"
            )
        seen.add(each.key)
