"""Testbed: a slow cluster on one machine by shaped links and nodes in network namespaces, or simulated links."""

from oases.testbed.backend import Backend
from oases.testbed.link import (
    INSIDE,
    Nodes,
    command_behind,
    environment_behind,
    inside,
    link_bytes_per_second,
    relaunch,
    set_rate,
    why_impossible,
    with_nodes,
)

__all__ = [
    "INSIDE",
    "Backend",
    "Nodes",
    "command_behind",
    "environment_behind",
    "inside",
    "link_bytes_per_second",
    "relaunch",
    "set_rate",
    "why_impossible",
    "with_nodes",
]
