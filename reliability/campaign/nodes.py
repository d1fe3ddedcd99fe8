"""Runs on nodes of the testbed, and their faults: lost and delayed packets, links that vanish, killed nodes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

from kills import children_of, words_of

from oases import testbed
from reliability.campaign.faults import Kind
from reliability.campaign.runs import Run, send

LINK = "1gbit"
NODES = 2
DEGRADED_SECONDS = (2.0, 5.0)
VANISHED_SECONDS = 10.0
_DROPS = "4,32 0 0 4294963256,37 0 1 {above},6 0 0 0,6 0 0 2"
"""Classic BPF: load a random word; pass if it is above a number, else drop. Unlike netem it is in every kernel."""


class NodesRun(Run):
    """`oases train` on two nodes in network namespaces."""

    def command(self) -> list[str]:
        """See `Run`."""
        return [*super().command(), "--nodes", str(NODES), "--link", LINK]

    def agents(self) -> list[int]:
        """Processes of the nodes' agents, in order of the nodes."""
        servers = [child for child in children_of(self.process.pid) if "forkserver" in words_of(child)]
        return sorted(agent for server in servers for agent in children_of(server))

    def ranks(self) -> list[int]:
        """See `Run`."""
        return sorted(rank for agent in self.agents() for rank in children_of(agent))

    def on_node(self, agent: int, shell: str) -> bool:
        """Run shell commands in the network of an agent's node; False where the agent has ended.

        The device of the node's link is $device.
        """
        enter = ["nsenter", "-t", str(agent), "-U", "-n", "--preserve-credentials"]
        find = "device=$(sed -n 's/^ *\\(node[0-9]*\\):.*/\\1/p' /proc/self/net/dev); test -n \"$device\" && "
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        done = subprocess.run(
            [*enter, "sh", "-c", find + shell], capture_output=True, text=True, check=False,
            env=os.environ | {"PATH": path},
        )  # fmt: skip
        if done.returncode and agent in self.agents():
            raise RuntimeError(f"{shell}: {done.stderr.strip()}")
        return not done.returncode


def why_not() -> str | None:
    """Reason why nodes cannot be made here; None if they can."""
    return testbed.why_impossible(LINK, NODES)


def _while_degraded(run: NodesRun, generator: random.Random, begin: str, end: str, seconds: float) -> None:
    """Change the link of a node for a while."""
    agents = run.agents()
    agent = generator.choice(agents) if agents else 0
    if agent and run.on_node(agent, begin):
        time.sleep(seconds)
        run.on_node(agent, end)


def _drop(run: NodesRun, generator: random.Random, share: float, seconds: float) -> None:
    code = _DROPS.format(above=int(share * 0xFFFFFFFF))
    each = "tc filter add dev $device {} protocol all bpf da bytecode '" + code + "'"
    begin = f"tc qdisc add dev $device clsact && {each.format('egress')} && {each.format('ingress')}"
    _while_degraded(run, generator, begin, "tc qdisc del dev $device clsact", seconds)


def lose(run: NodesRun, generator: random.Random) -> None:
    """Drop a part of the packets to and from a node for a while."""
    _drop(run, generator, generator.choice((0.02, 0.1, 0.3)), generator.uniform(*DEGRADED_SECONDS))


def part(run: NodesRun, generator: random.Random) -> None:
    """Drop all packets to and from a node for ten seconds, which no one is told of."""
    _drop(run, generator, 1.0, VANISHED_SECONDS)


def delay(run: NodesRun, generator: random.Random) -> None:
    """Queue the packets from a node behind a rate of 300 kbit/s for a while, by up to two seconds."""
    change = "tc qdisc change dev $device root tbf rate {} latency {}"
    begin, end = change.format("300kbit burst 3000", "2s"), change.format(f"{LINK} burst 256kb", "200ms")
    _while_degraded(run, generator, begin, end, generator.uniform(*DEGRADED_SECONDS))


def unlink(run: NodesRun, generator: random.Random) -> None:
    """Set a node's link down for ten seconds."""
    begin, end = "ip link set $device down", "ip link set $device up"
    _while_degraded(run, generator, begin, end, VANISHED_SECONDS)


def kill_node(run: NodesRun, generator: random.Random) -> None:
    """Kill a node: its agent and ranks."""
    agents = run.agents()
    if agents:
        agent = generator.choice(agents)
        for process in [*children_of(agent), agent]:
            send(process, signal.SIGKILL)


FAULTS = {
    "loss": Kind(lose, False),
    "delay": Kind(delay, False),
    "partition": Kind(part, False),
    "link down": Kind(unlink, False),
    "kill node": Kind(kill_node, True),
}
