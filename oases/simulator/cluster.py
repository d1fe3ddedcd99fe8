"""Clusters by name, such as 64x3090, from shipped profiles based on vendors' data sheets, not on measurements."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources

from oases.errors import UsageError
from oases.simulator.hardware import Hardware
from oases.simulator.hardware_file import hardware_of


def known_clusters() -> list[str]:
    """Names of the shipped profiles, as they follow the x in COUNTxNAME."""
    files = resources.files("oases.simulator").joinpath("clusters").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


ONE_NODE = 8
"""Number of devices up to which a cluster is one node, unless the ranks per node are given."""


def cluster_called(name: str, ranks_per_node: int | None = None) -> tuple[Hardware, int]:
    """Hardware and number of ranks of a cluster named COUNTxNAME, or NODESxCOUNTxNAME with COUNT devices a node.

    ranks_per_node: None for one node up to 8 devices, and the profile's for more. Raises UsageError, listing known
    names.
    """
    match = re.fullmatch(r"(?:(\d{1,7})x)?(\d{1,7})x(.+)", name.strip().lower())
    if match is None or not all(int(each or 1) for each in match.groups()[:2]):
        raise UsageError(
            f"cluster {name!r} is not COUNTxNAME, e.g. 64x3090, or NODESxCOUNTxNAME, e.g. 2x8x3090; names are "
            f"{', '.join(known_clusters())}, or measure yours with oases profile"
        )
    count, plain = int(match[2]), match[3]
    if match[1] is not None:
        if ranks_per_node not in (None, count):
            raise UsageError(
                f"cluster {name!r} has nodes of {count}; leave out --ranks-per-node {ranks_per_node}, or give "
                f"{int(match[1]) * count}x{plain}"
            )
        count, ranks_per_node = int(match[1]) * count, count
    if plain not in known_clusters():
        raise UsageError(
            f"cluster {name!r}: unknown device {plain!r}; known are {', '.join(known_clusters())}, or measure yours "
            "with oases profile"
        )
    hardware = _shipped(plain)
    per_node = ranks_per_node or (max(count, 1) if count <= ONE_NODE else hardware.ranks_per_node)
    hardware = replace(hardware, ranks_per_node=per_node)
    if count > per_node and count % per_node:
        below, above = count - count % per_node, count - count % per_node + per_node
        raise UsageError(
            f"cluster {name!r}: {count} ranks do not fill nodes of {per_node}; give {below}x{plain} or "
            f"{above}x{plain}, or another --ranks-per-node"
        )
    return hardware, count


def described(hardware: Hardware, world: int) -> str:
    """Description of a cluster in a line: devices, nodes and links."""
    device, per_node = hardware.device, hardware.ranks_per_node
    nodes = -(-world // per_node)
    text = f"{world} x {device.name} ({device.memory_bytes / 2**30:.0f} GiB): "
    inside = f"{hardware.node.bytes_per_second / 1e9:.3g} GB/s between the devices of a node"
    if nodes == 1:
        return f"{text}1 node of {world}{', ' + inside if world > 1 else ''}"
    between = f"{8e-9 * hardware.cluster.bytes_per_second:.3g} Gbit/s between nodes"
    return f"{text}{nodes} nodes of {per_node}, {inside}, {between}"


_RATE = re.compile(r"(?:(node|cluster)=)?(\d+(?:\.\d+)?)(kbit|mbit|gbit|mb/s|gb/s)")
_UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "mb/s": 1e6, "gb/s": 1e9}


def with_link(hardware: Hardware, world: int, text: str) -> Hardware:
    """The hardware with links of the rates in `text`, such as 25gbit, or node=20GB/s,cluster=25gbit.

    A rate without a name is that between nodes, of a single node that inside it. Measured samples of a link are
    dropped with its rate. Raises UsageError.
    """
    for part in text.split(","):
        match = _RATE.fullmatch(part.strip().lower())
        if match is None:
            raise UsageError(
                f"link {part!r} is not a rate; give a number and kbit, mbit, gbit, MB/s or GB/s, such as 25gbit, or "
                "node=20GB/s,cluster=25gbit"
            )
        rate = float(match[2]) * _UNITS[match[3]]
        if not 1e3 <= rate <= 1e13:
            raise UsageError(f"link {part!r} is out of range; give one between 8kbit and 10000GB/s")
        place = match[1] or ("node" if world <= hardware.ranks_per_node else "cluster")
        link = replace(hardware.link(place), bytes_per_second=rate, samples=())
        hardware = replace(hardware, node=link) if place == "node" else replace(hardware, cluster=link)
    return hardware


def _shipped(name: str) -> Hardware:
    text = resources.files("oases.simulator").joinpath("clusters", f"{name}.json").read_text(encoding="utf-8")
    return hardware_of(json.loads(text), f"cluster {name!r}")
