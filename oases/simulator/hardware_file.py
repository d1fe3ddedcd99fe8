"""Hardware profiles as files: readable JSON, each field with its unit in its name, each mistake named on reading."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from oases.errors import UsageError
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock, MeasuredOverhead
from oases.simulator.hardware_fields import FORMAT, VERSION, hardware_of, require_distinct
from oases.simulator.links import LinkModel, Sample
from oases.simulator.published import from_published, is_published


def read_hardware(path_or_text: str | Path) -> Hardware:
    """The hardware of a profile, given by its path or as its text. UsageError names the field and the remedy.

    A file of published block times in milliseconds (see `published`) is read too.
    """
    text, where = _text_of(path_or_text)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}; write one with: oases profile --json FILE") from error
    if is_published(data):
        hardware = from_published(data, where)
        require_distinct(hardware, where)
        return hardware
    return hardware_of(data, where)


def write(hardware: Hardware, path: str | Path) -> None:
    """Write a profile that `read_hardware` reads back. The file is there whole or not at all."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.resolve().parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(to_json(hardware))
        mask = os.umask(0)  # what mkstemp made is for its owner alone
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def to_json(hardware: Hardware) -> str:
    """The text of the file."""
    device = {item.name: getattr(hardware.device, item.name) for item in fields(Device)}
    head = {
        "format": FORMAT, "version": VERSION, "name": hardware.name, "about": hardware.about, "date": hardware.date,
        "device": device | {"flops_per_second": dict(hardware.device.flops_per_second)},
        "ranks_per_node": hardware.ranks_per_node,
        "links": {"node": _link_out(hardware.node), "cluster": _link_out(hardware.cluster)},
    }  # fmt: skip
    text = json.dumps(head, indent=1, allow_nan=False)
    rows = {
        "blocks": [_block_out(block) for block in hardware.blocks],
        "overheads": [_timed_out(overhead) for overhead in hardware.overheads],
    }
    # One line a row: thousands of lines of one number each could not be read.
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
    path = Path(path_or_text)
    if not str(path_or_text) or not path.is_file():
        raise UsageError(
            f"hardware profile {str(path_or_text)!r} is no file; write one with: oases profile --json FILE"
        )
    try:
        return path.read_text(encoding="utf-8"), f"hardware profile {str(path)!r}"
    except UnicodeDecodeError as error:
        raise UsageError(f"hardware profile {str(path)!r} is not UTF-8 text: {error.reason}") from error
