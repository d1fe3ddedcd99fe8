"""A slow link on one machine: a private network namespace whose traffic is shaped to a rate.

With one node that is the namespace's loopback: every byte between ranks pays a commodity link's price. With several,
each node has a namespace of its own (oases/testbed/nodes.py), and only what goes between them pays. Everything
vanishes with the process. Linux only, no root needed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from oases.errors import UsageError

# As seen by the re-launched process: the rate of the link it is behind, and between how many nodes.
INSIDE = "OASES_TESTBED_LINK"

UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "kb": 1e3, "mb": 1e6, "gb": 1e9}
"""Bytes per second of one unit of a rate."""
SHAPED = 'root tbf rate "$1" burst 256kb latency 200ms'
"""What `tc qdisc add dev DEVICE` takes to shape what leaves a device to the rate $1."""
_ONE_NODE = f"ip link set lo up && tc qdisc add dev lo {SHAPED}"
_SEVERAL_NODES = "ip link set lo up"  # the nodes have namespaces below this one
_TRY_SEVERAL_NODES = (
    f"{_SEVERAL_NODES} && unshare -n true && ip link add try0 type veth peer name try1 && "
    f"tc qdisc add dev try0 {SHAPED} && ip link add try2 type bridge"
)


def link_bytes_per_second(rate: str) -> float:
    """Bytes per second of a link rate such as "500mbit" or "1gbit"; UsageError where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"unknown link rate {rate!r}; give a number and kbit, mbit or gbit, e.g. 500mbit")
    bytes_per_second = float(match[1]) * UNITS[match[2]]
    if not 1e3 <= bytes_per_second <= 12.5e9:
        raise UsageError(f"link rate {rate!r} is out of range; give one between 8kbit and 100gbit")
    return bytes_per_second


def with_nodes(rate: str, nodes: int) -> str:
    """A link in words: "500mbit", or "500mbit between 2 nodes"."""
    return rate if nodes == 1 else f"{rate} between {nodes} nodes"


def inside(rate: str, nodes: int = 1) -> bool:
    """Whether this process was re-launched behind a link of this rate, for this many nodes, already."""
    return os.environ.get(INSIDE) == with_nodes(rate, nodes)


def _environment() -> dict[str, str]:
    # ip and tc live where a plain user's PATH does not look.
    return os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}


def environment_behind(rate: str, nodes: int = 1) -> dict[str, str]:
    """The environment for `command_behind`."""
    environment = _environment() | {INSIDE: with_nodes(rate, nodes), "GLOO_SOCKET_IFNAME": "lo"}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no names are resolved in here; c10d would say so
    return environment


def command_behind(rate: str, command: Sequence[str], nodes: int = 1) -> list[str]:
    """`command` in a private network namespace: behind a loopback of `rate`, or where it can make several nodes."""
    shell = f'{_ONE_NODE if nodes == 1 else _SEVERAL_NODES} && shift && exec "$@"'
    return ["unshare", "-rn", "sh", "-c", shell, "sh", rate, *command]


def why_impossible(rate: str, nodes: int = 1) -> str | None:
    """Why no shaped link, between several nodes, can be made here, with the remedy; None if it can."""
    link_bytes_per_second(rate)
    path = _environment()["PATH"]
    if not sys.platform.startswith("linux"):
        return f"a shaped link needs Linux network namespaces, and this is {sys.platform}"
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool, path=path) is None:
            return f"'{tool}' is missing; install the package {package}"
    probe = subprocess.run(
        ["unshare", "-rn", "sh", "-c", _ONE_NODE if nodes == 1 else _TRY_SEVERAL_NODES, "sh", rate],
        env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode == 0:
        return None
    reason = probe.stderr.strip().splitlines()[-1] if probe.stderr.strip() else f"exit {probe.returncode}"
    modules = "module sch_tbf" if nodes == 1 else "modules sch_tbf, veth and bridge"
    return (
        f"a private network namespace was refused ({reason}); allow unprivileged user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0 on "
        f"Ubuntu) and load the kernel {modules}"
    )


def relaunch(rate: str, arguments: Sequence[str], nodes: int = 1, script: str | None = None) -> None:
    """Replace this process by `python -m oases ARGUMENTS`, or `python SCRIPT ARGUMENTS`, behind a link of `rate`.

    Does not return.
    """
    # Not -m: that would look for the package in the current folder first, where a source tree may lie.
    start = "import sys; sys.path[:] = [p for p in sys.path if p]; from oases.cli import main; main()"
    program = ["-c", start] if script is None else [script]
    command = command_behind(rate, [sys.executable, *program, *arguments], nodes)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment_behind(rate, nodes))
