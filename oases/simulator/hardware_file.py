"""Hardware profile files: readable JSON with the unit in each field's name, checked on reading."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from oases.errors import UsageError
from oases.files import parse_json, read_text, write_text
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock, MeasuredOverhead
from oases.simulator.hardware_fields import FORMAT, VERSION, hardware_of
from oases.simulator.links import LinkModel, Sample

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
    device = {item.name: getattr(hardware.device, item.name) for item in fields(Device)}
    head = {
        "format": FORMAT, "version": VERSION, "name": hardware.name, "about": hardware.about, "date": hardware.date,
        "device": device | {name: dict(device[name]) for name in ("flops_per_second", "packing_bytes_per_second")},
        "ranks_per_node": hardware.ranks_per_node,
        "links": {"node": _link_out(hardware.node), "cluster": _link_out(hardware.cluster)},
    }  # fmt: skip
    text = json.dumps(head, indent=1, allow_nan=False)
    rows = {
        "blocks": [_block_out(block) for block in hardware.blocks],
        "overheads": [_timed_out(overhead) for overhead in hardware.overheads],
    }
    # One line per row: thousands of one-number lines would be unreadable.
    for name, items in rows.items():
        lines = ",\n  ".join(json.dumps(item, allow_nan=False) for item in items)
        text = text.removesuffix("\n}") + f',\n "{name}": [' + (f"\n  {lines}\n ]" if items else "]") + "\n}"
    return text + "\n"


def _link_out(link: LinkModel) -> dict[str, Any]:
    return {
        "startup_seconds": link.startup_seconds,
        "bytes_per_second": link.bytes_per_second,
        "contention": {"compute_slowdown": link.contention.compute, "link_slowdown": link.contention.link},
        "samples": [{item.name: getattr(sample, item.name) for item in fields(Sample)} for sample in link.samples],
    }


def _block_out(block: MeasuredBlock) -> dict[str, Any]:
    plain = {item.name: getattr(block, item.name) for item in fields(MeasuredBlock) if item.name != "times"}
    return plain | {f"{item.name}_seconds": getattr(block.times, item.name) for item in fields(BlockTimes)}


def _timed_out(overhead: MeasuredOverhead) -> dict[str, Any]:
    timed = ("forward", "backward")
    return {
        item.name + ("_seconds" if item.name in timed else ""): getattr(overhead, item.name)
        for item in fields(MeasuredOverhead)
    }


def _text_of(path_or_text: str | Path) -> tuple[str, str]:
    if isinstance(path_or_text, str) and path_or_text.lstrip()[:1] in ("{", "["):
        return path_or_text, "hardware profile"
    return read_text(path_or_text, "hardware profile", _REMEDY), f"hardware profile {str(path_or_text)!r}"
