"""Hardware profile files: readable JSON with the unit in each field's name, checked on reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oases.records as records
from oases.core.dtypes import QUANTISED
from oases.errors import UsageError
from oases.files import parse_json, read_text, write_text
from oases.records import OneOf
from oases.simulator.hardware import Hardware

FORMAT = "oases hardware"
VERSION = 1
_REMEDY = "write one with: oases profile --json FILE"


def read_hardware(path_or_text: str | Path) -> Hardware:
    """Read a hardware profile, given by its path or as text. Raises UsageError with the field and the remedy."""
    text, where = _text_of(path_or_text)
    data = parse_json(text, where, _REMEDY)
    if isinstance(data, dict) and "format" not in data and "rows" in data:
        raise UsageError(
            f"{where} is a table of published block times; convert it with: python "
            "benchmarks/papers/oases_objective.py --table FILE --profile-to FILE, in the source tree of oases"
        )
    return hardware_of(data, where)


def write(hardware: Hardware, path: str | Path) -> None:
    """Write a profile atomically, for `read_hardware`."""
    write_text(path, to_json(hardware), "hardware profile")


def to_json(hardware: Hardware) -> str:
    """The profile as JSON text."""
    head = {"format": FORMAT, "version": VERSION, **records.plain(hardware)}
    rows = {name: head.pop(name) for name in ("blocks", "overheads")}
    text = json.dumps(head, indent=1, allow_nan=False)
    # One line per row: thousands of one-number lines would be unreadable.
    for name, items in rows.items():
        lines = ",\n  ".join(json.dumps(item, allow_nan=False) for item in items)
        text = text.removesuffix("\n}") + f',\n "{name}": [' + (f"\n  {lines}\n ]" if items else "]") + "\n}"
    return text + "\n"


def hardware_of(data: Any, where: str) -> Hardware:
    """Parse the data of a profile. Raises UsageError with the field and the remedy."""
    body = _with_one_rate(records.body(data, FORMAT, VERSION, where, _REMEDY, "a hardware profile"), where)
    hardware = records.read(Hardware, body, where, _REMEDY)
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


def _with_one_rate(body: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields with one rate of quantising: older profiles hold one for each code, of which int8's is used."""
    device = body.get("device")
    rates = device.get("packing_bytes_per_second") if isinstance(device, dict) else None
    if not isinstance(rates, dict):
        return body
    for name in rates:
        if wrong := OneOf((QUANTISED, "fp8", "int4")).fault(name):
            raise UsageError(f"{where}: device: packing_bytes_per_second: a communication dtype {wrong}")
    return body | {"device": {**body["device"], "packing_bytes_per_second": rates.get(QUANTISED, 0.0)}}


def _text_of(path_or_text: str | Path) -> tuple[str, str]:
    if isinstance(path_or_text, str) and path_or_text.lstrip()[:1] in ("{", "["):
        return path_or_text, "hardware profile"
    return read_text(path_or_text, "hardware profile", _REMEDY), f"hardware profile {str(path_or_text)!r}"
