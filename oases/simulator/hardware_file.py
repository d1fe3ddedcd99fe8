"""Hardware profile files: readable JSON with the unit in each field's name, checked on reading.

Published block times, in milliseconds by hidden, tensor-parallel degree and batch, can be read too:

    {"sequence": 1024, "dtype": "float32", "device": "RTX 3090 24 GiB", "gpus": 32, "gpus_per_server": 4,
     "rows": [{"hidden": 1024, "tp": 1, "batch": 1, "attention_forward_ms": ..., "attention_backward_ms": ...,
               "mlp_forward_ms": ..., "mlp_backward_ms": ..., "all_reduce_ms": ..., "runtime_memory_mib": ...}]}

null means that the configuration did not fit. all_reduce_ms is an all-reduce of the batch's activations over all
`gpus`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from oases.errors import UsageError
from oases.files import parse_json, read_text, write_text
from oases.limits import short
from oases.plans.shape import ELEMENT_BYTES, KINDS, LARGEST, ModelShape
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock, MeasuredOverhead
from oases.simulator.hardware_fields import FORMAT, VERSION, hardware_of, require_distinct
from oases.simulator.links import LinkModel, Sample, fit_link
from oases.simulator.program import Contention

HEAD_WIDTH = 64
"""Assumed features per head: published tables do not give the number of heads."""
_GIB = 1 << 30
_REMEDY = "write one with: oases profile --json FILE"


def is_published(data: Any) -> bool:
    """Whether the data are published block times."""
    return isinstance(data, Mapping) and "format" not in data and "rows" in data


def from_published(data: Mapping[str, Any], where: str) -> Hardware:
    """Convert published block times. Raises UsageError for missing or inconsistent fields.

    Assumptions: recomputation takes as long as a forward pass, C and its backward take no time, and B is the whole
    backward pass. The single measured link serves as both links.
    """
    sequence, gpus, per_server = (_whole(data, name, where) for name in ("sequence", "gpus", "gpus_per_server"))
    dtype, device = data.get("dtype"), data.get("device")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise UsageError(f"{where}: dtype is {short(dtype)}; known are {', '.join(ELEMENT_BYTES)}")
    if gpus < 2:
        raise UsageError(f"{where}: gpus must be at least 2, between which all_reduce_ms was measured, got {gpus}")
    if not isinstance(data["rows"], list) or not data["rows"]:
        raise UsageError(f"{where}: rows must be a list of at least one row, got {short(data['rows'])}")
    rows = [_row(row, f"{where}: rows[{number}]") for number, row in enumerate(data["rows"])]
    blocks: list[MeasuredBlock] = []
    reduced: dict[int, list[float]] = {}
    for row in rows:
        for kind in KINDS:
            forward, backward = row[f"{kind}_forward_ms"], row[f"{kind}_backward_ms"]
            if forward is None or backward is None:
                continue
            times = BlockTimes(
                forward=forward / 1e3, forward_unkept=forward / 1e3, combine=0.0, recompute=forward / 1e3,
                recompute_whole=forward / 1e3, combine_backward=0.0, backward=backward / 1e3, weight_gradient=0.0,
            )  # fmt: skip
            heads = max(1, row["hidden"] // HEAD_WIDTH)
            blocks.append(
                MeasuredBlock(kind, row["hidden"], heads, sequence, dtype, row["tp"], float(row["batch"]), times)
            )
        if row["all_reduce_ms"] is not None:
            num_bytes = row["batch"] * sequence * row["hidden"] * ELEMENT_BYTES[dtype]
            reduced.setdefault(num_bytes, []).append(row["all_reduce_ms"] / 1e3)
    if not blocks or not reduced:
        raise UsageError(f"{where}: no row has block times and all_reduce_ms, so nothing can be planned with it")
    samples = [Sample("all_reduce", gpus, size, median(seconds)) for size, seconds in sorted(reduced.items())]
    try:
        cluster = fit_link(samples, Contention())
    except ValueError as error:
        raise UsageError(f"{where}: all_reduce_ms: {error}") from error
    return Hardware(
        name=str(device), device=_device(str(device), dtype, blocks, where), ranks_per_node=per_server,
        node=LinkModel(cluster.startup_seconds, cluster.bytes_per_second), cluster=cluster, blocks=tuple(blocks),
        about=f"Published block times, converted. {data.get('about', '')} Assumed: recomputation is a forward "
        "pass, weight gradients are part of the backward pass; the intra-node link is as fast as the "
        "inter-node link, without contention.",
    )  # fmt: skip


def _row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where} must be an object, got {short(row)}")
    found: dict[str, Any] = {name: _whole(row, name, where) for name in ("hidden", "tp", "batch")}
    for name in (*(f"{kind}_{pass_}_ms" for kind in KINDS for pass_ in ("forward", "backward")), "all_reduce_ms"):
        if name not in row:
            raise UsageError(f"{where}: field {name!r} is missing; give null for what did not fit")
        value = row[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-9 <= value <= 3.6e6
        ):
            raise UsageError(
                f"{where}: {name} must be a number of milliseconds above 0 and up to an hour, or null, got "
                f"{short(value)}"
            )
        found[name] = value
    return found


def _whole(data: Mapping[str, Any], name: str, where: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}: {name} must be a whole number of at least 1, got {short(value)}")
    if value > LARGEST:
        raise UsageError(f"{where}: {name} must be at most {LARGEST}, got {short(value)}")
    return value


def _device(name: str, dtype: str, blocks: list[MeasuredBlock], where: str) -> Device:
    """Device with memory from its name and rates from a shipped profile, or else from the fastest MLP (lower
    bounds).
    """
    memory = re.search(r"(\d+)\s*Gi?B", name, re.IGNORECASE)
    if memory is None:
        raise UsageError(f"{where}: device {short(name)} does not state its memory; write it as 'RTX 3090 24 GiB'")
    flops = moved = 0.0
    for block in blocks:
        shape = ModelShape(block.hidden, 1, block.heads, block.sequence, dtype=dtype)
        done = sum(shape.matmul_flops(block.kind, block.tp, block.samples))
        touched = 2 * shape.kept_bytes(block.kind, block.tp, block.samples)
        flops, moved = max(flops, done / block.times.forward), max(moved, touched / block.times.forward)
    from oases.simulator.cluster import shipped_device  # imported here: cluster imports this module

    known = shipped_device(name)
    return Device(
        name, int(memory[1]) * _GIB, {dtype: flops}, known.bytes_per_second if known else moved,
        known.launch_seconds if known else 0.0,
    )  # fmt: skip


def read_hardware(path_or_text: str | Path) -> Hardware:
    """Read a hardware profile, given by its path or as text. Raises UsageError with the field and the remedy.

    Files of published block times in milliseconds (see `from_published`) are converted.
    """
    text, where = _text_of(path_or_text)
    data = parse_json(text, where, _REMEDY)
    if is_published(data):
        hardware = from_published(data, where)
        require_distinct(hardware, where)
        return hardware
    return hardware_of(data, where)


def write(hardware: Hardware, path: str | Path) -> None:
    """Write a profile atomically, for `read_hardware`."""
    write_text(path, to_json(hardware), "hardware profile")


def to_json(hardware: Hardware) -> str:
    """The profile as JSON text."""
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
