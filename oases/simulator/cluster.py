"""Clusters by name, such as 64x3090, from shipped profiles based on vendors' data sheets, not on measurements."""

from __future__ import annotations

import json
import re
from importlib import resources

from oases.errors import UsageError
from oases.simulator.hardware import Device, Hardware
from oases.simulator.hardware_fields import hardware_of


def known_clusters() -> list[str]:
    """Names of the shipped profiles, as they follow the x in COUNTxNAME."""
    files = resources.files("oases.simulator").joinpath("clusters").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def cluster_called(name: str) -> tuple[Hardware, int]:
    """Hardware and number of ranks of a cluster named COUNTxNAME. Raises UsageError, listing known names."""
    match = re.fullmatch(r"(\d{1,7})x(.+)", name.strip().lower())
    if match is None or int(match[1]) < 1:
        raise UsageError(
            f"cluster {name!r} is not COUNTxNAME, e.g. 64x3090; names are {', '.join(known_clusters())}, or "
            "measure yours with oases profile"
        )
    count, plain = int(match[1]), match[2]
    if plain not in known_clusters():
        raise UsageError(
            f"cluster {name!r}: unknown device {plain!r}; known are {', '.join(known_clusters())}, or measure yours "
            "with oases profile"
        )
    hardware = _shipped(plain)
    per_node = hardware.ranks_per_node
    if count > per_node and count % per_node:
        below, above = count - count % per_node, count - count % per_node + per_node
        raise UsageError(
            f"cluster {name!r}: {count} ranks do not fill nodes of {per_node}; give {below}x{plain} or "
            f"{above}x{plain}, or a profile with another ranks_per_node"
        )
    return hardware, count


def shipped_device(words: str) -> Device | None:
    """Device of the profile whose name is a word of `words`; None if there is none."""
    given = set(re.findall(r"\w+", words.lower()))
    for name in known_clusters():
        if name in given:
            return _shipped(name).device
    return None


def _shipped(name: str) -> Hardware:
    text = resources.files("oases.simulator").joinpath("clusters", f"{name}.json").read_text(encoding="utf-8")
    return hardware_of(json.loads(text), f"cluster {name!r}")
