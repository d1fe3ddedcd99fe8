"""Slow link on one machine: a private network namespace whose traffic is shaped to a rate.

With one node the namespace's loopback is shaped: all traffic between ranks has the speed of a commodity link. With
several, each node has a namespace of its own (`Nodes`), and only inter-node traffic is shaped. Everything vanishes
with the process. Linux only, no root needed.
Two nodes are joined by one veth pair, more by a bridge in the parent namespace. Traffic out of a node and, on the
bridge, into a node is shaped to the link's rate. A node's namespace lives as long as the processes in it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from oases.errors import UsageError

# Environment of the re-launched process: the rate of its link, and the number of nodes.
INSIDE = "OASES_TESTBED_LINK"

UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "kb": 1e3, "mb": 1e6, "gb": 1e9}
"""Bytes per second of one unit of a rate."""
SHAPED = 'root tbf rate "$1" burst 256kb latency 200ms'
"""Arguments of `tc qdisc add dev DEVICE` to shape what leaves a device to the rate $1."""
_ONE_NODE = f"ip link set lo up && tc qdisc add dev lo {SHAPED}"
_SEVERAL_NODES = "ip link set lo up"  # the nodes have namespaces below this one
_TRY_SEVERAL_NODES = (
    f"{_SEVERAL_NODES} && unshare -n true && ip link add try0 type veth peer name try1 && "
    f"tc qdisc add dev try0 {SHAPED} && ip link add try2 type bridge"
)


def link_bytes_per_second(rate: str) -> float:
    """Bytes per second of a link rate such as "500mbit" or "1gbit". Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"unknown link rate {rate!r}; give a number and kbit, mbit or gbit, e.g. 500mbit")
    bytes_per_second = float(match[1]) * UNITS[match[2]]
    if not 1e3 <= bytes_per_second <= 12.5e9:
        raise UsageError(f"link rate {rate!r} is out of range; give one between 8kbit and 100gbit")
    return bytes_per_second


def with_nodes(rate: str, nodes: int) -> str:
    """Description of a link: "500mbit", or "500mbit between 2 nodes"."""
    return rate if nodes == 1 else f"{rate} between {nodes} nodes"


def inside(rate: str, nodes: int = 1) -> bool:
    """Whether this process was re-launched behind a link of this rate for this many nodes."""
    return os.environ.get(INSIDE) == with_nodes(rate, nodes)


def set_rate(bits_per_second: float) -> str:
    """Change the rate of the shaped loopback of this process's namespace; return it, e.g. "812.5mbit".

    Raises UsageError for a rate out of range, RuntimeError where no loopback is shaped.
    """
    rate = f"{bits_per_second / 1e6:.6g}mbit"
    link_bytes_per_second(rate)
    command = ["sh", "-c", f"tc qdisc change dev lo {SHAPED}", "sh", rate]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stderr.strip()} (tc qdisc change to {rate}, outside of oases.testbed.relaunch?)")
    return rate


def _environment() -> dict[str, str]:
    # ip and tc are outside a regular user's PATH.
    return os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}


def environment_behind(rate: str, nodes: int = 1) -> dict[str, str]:
    """Environment for `command_behind`."""
    environment = _environment() | {INSIDE: with_nodes(rate, nodes), "GLOO_SOCKET_IFNAME": "lo"}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d would warn of missing name resolution
    return environment


def command_behind(rate: str, command: Sequence[str], nodes: int = 1) -> list[str]:
    """`command` in a private network namespace: behind a loopback of `rate`, or ready to create several nodes."""
    shell = f'{_ONE_NODE if nodes == 1 else _SEVERAL_NODES} && shift && exec "$@"'
    return ["unshare", "-rn", "sh", "-c", shell, "sh", rate, *command]


def why_impossible(rate: str, nodes: int = 1) -> str | None:
    """Reason why a shaped link is not available here, with the remedy; None if it is."""
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
    # Not -m: it would look for the package in the current folder first, which may be a source tree.
    start = "import sys; sys.path[:] = [p for p in sys.path if p]; from oases.cli import main; main()"
    program = ["-c", start] if script is None else [script]
    command = command_behind(rate, [sys.executable, *program, *arguments], nodes)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment_behind(rate, nodes))


_MOST = 250  # addresses in a /24
_CLONE_NEWNET = 0x40000000  # of sched.h


@dataclass(frozen=True)
class Nodes:
    """`count` nodes (at least 2) joined by links of the rate `link`, e.g. "500mbit".

    Ranks are distributed evenly, in rank order. To create the nodes, in a process behind the link
    (oases.testbed.relaunch): call `enter` in a process per node, then `join` in their parent, then `open` in each.
    """

    count: int
    link: str

    def ranks_per_node(self, size: int) -> int:
        """Ranks per node for `size` ranks. Raises UsageError if they do not divide evenly."""
        if self.count < 1 or self.count > _MOST:
            raise UsageError(f"--nodes must be between 1 and {_MOST}, got {self.count}")
        if size % self.count:
            counts = ", ".join(str(count) for count in range(1, size + 1) if size % count == 0)
            raise UsageError(
                f"{size} ranks do not divide evenly over --nodes {self.count}; valid node counts: {counts}"
            )
        return size // self.count

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return f"10.0.0.{node + 1}"

    def interface(self, node: int) -> str:
        """Name of a node's end of the link, on the node."""
        return f"node{node}"

    def require_inside(self) -> None:
        """Raise UsageError unless this process was re-launched behind the link, where nodes can be created."""
        if not inside(self.link, self.count):
            raise UsageError(
                f"{self.count} nodes require a private network namespace, but this process is in none; start "
                f"it as `oases COMMAND --link {self.link} --nodes {self.count}`, or by oases.testbed.command_behind"
            )

    def enter(self) -> None:
        """Move the calling thread and its children to a new network namespace. Raises OSError if refused."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"a network namespace was refused: {os.strerror(number)}")

    def join(self, pids: Sequence[int]) -> None:
        """Join the namespaces of the processes `pids`, one per node, that have called `enter`."""
        if self.count == 2:
            self._shell(
                f"ip link add {self.interface(0)} netns {pids[0]} type veth "
                f"peer name {self.interface(1)} netns {pids[1]}"
            )
        else:
            # Named after processes: interfaces of an earlier run may take a moment to vanish.
            bridge = f"net{pids[0]}"
            self._shell(f"ip link add {bridge} type bridge && ip link set {bridge} up")
            for node, pid in enumerate(pids):
                port = f"port{pid}"
                self._shell(
                    f"ip link add {port} type veth peer name {self.interface(node)} netns {pid} && "
                    f"tc qdisc add dev {port} {SHAPED} && ip link set {port} master {bridge} up"
                )

    def open(self, node: int) -> None:
        """Start the loopback and the link's interface on a joined node, and select it for gloo."""
        name = self.interface(node)
        self._shell(
            f"ip link set lo up && ip address add {self.address(node)}/24 dev {name} && "
            f"tc qdisc add dev {name} {SHAPED} && ip link set {name} up"
        )
        os.environ["GLOO_SOCKET_IFNAME"] = name

    def _shell(self, command: str) -> None:
        done = subprocess.run(["sh", "-c", command, "sh", self.link], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{done.stderr.strip()} ({command})")
