"""Several nodes on one machine: network namespaces with fast loopbacks, joined by shaped links.

Two nodes are joined by one veth pair, more by a bridge in the namespace above them. Whatever leaves a node, and on
the bridge whatever enters one, is shaped to the link's rate. A node's namespace lives as long as the processes in it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from oases.errors import UsageError
from oases.testbed.link import SHAPED, inside

_MOST = 250  # addresses in a /24
_CLONE_NEWNET = 0x40000000  # of sched.h


@dataclass(frozen=True)
class Nodes:
    """`count` nodes, two or more, joined by links of the rate `link`, e.g. "500mbit".

    Ranks are spread evenly, in rank order. To make the nodes, in a process behind the link (oases.testbed.relaunch):
    `enter` in a process per node, then `join` above them, then `open` in each.
    """

    count: int
    link: str

    def ranks_per_node(self, size: int) -> int:
        """How many of `size` ranks a node has; UsageError where they cannot be spread evenly."""
        if self.count < 1 or self.count > _MOST:
            raise UsageError(f"--nodes must be between 1 and {_MOST}, got {self.count}")
        if size % self.count:
            counts = ", ".join(str(count) for count in range(1, size + 1) if size % count == 0)
            raise UsageError(
                f"{size} ranks cannot be spread evenly over --nodes {self.count}; counts that do: {counts}"
            )
        return size // self.count

    def address(self, node: int) -> str:
        """The IPv4 address of a node."""
        return f"10.0.0.{node + 1}"

    def interface(self, node: int) -> str:
        """The name, on a node, of its end of the link."""
        return f"node{node}"

    def require_inside(self) -> None:
        """Raise UsageError unless this process was re-launched behind the link: nodes are made in there alone."""
        if not inside(self.link, self.count):
            raise UsageError(
                f"{self.count} nodes are made inside a private network namespace, and this process is in none; start "
                f"it as `oases COMMAND --link {self.link} --nodes {self.count}`, or by oases.testbed.command_behind"
            )

    def enter(self) -> None:
        """Give the calling thread, and what it starts, a network of its own; OSError where that is refused."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"a network namespace was refused: {os.strerror(number)}")

    def join(self, pids: Sequence[int]) -> None:
        """Join the namespaces that the processes `pids`, one per node, have entered."""
        if self.count == 2:
            self._shell(
                f"ip link add {self.interface(0)} netns {pids[0]} type veth "
                f"peer name {self.interface(1)} netns {pids[1]}"
            )
        else:
            # Named by processes: what an earlier run has left may take a moment to vanish.
            bridge = f"net{pids[0]}"
            self._shell(f"ip link add {bridge} type bridge && ip link set {bridge} up")
            for node, pid in enumerate(pids):
                port = f"port{pid}"
                self._shell(
                    f"ip link add {port} type veth peer name {self.interface(node)} netns {pid} && "
                    f"tc qdisc add dev {port} {SHAPED} && ip link set {port} master {bridge} up"
                )

    def open(self, node: int) -> None:
        """On a node that is joined: start its loopback and its end of the link, and name that to gloo."""
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
