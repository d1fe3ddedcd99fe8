"""The groups whose links and blocks are measured: ranks inside a node, ranks across nodes, all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from oases.execution.group import ProcessGroup


@dataclass(frozen=True)
class Probe:
    """Groups of one size that communicate at once. mine: this rank's group; None where it has none."""

    scope: str
    ranks: int
    mine: ProcessGroup | None


def ranks_per_node(world: int, *, shaped: bool) -> int:
    """As the launcher says; 1 on a single node whose ranks are joined by a shaped or simulated link.

    Such a link stands between all ranks, as if each were a node of its own.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:  # nodes of different sizes
        local = 1
    return 1 if local == world and shaped else local


def contiguous(size: int) -> ProcessGroup:
    """This rank's group of `size` ranks that follow one another; every rank must call this."""
    world, mine = dist.get_world_size(), None
    if size == world and dist.group.WORLD is not None:
        return dist.group.WORLD
    for first in range(0, world, size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            mine = group
    assert mine is not None, f"groups of {size} do not hold every one of {world} ranks"
    return mine


def strided(ranks: Sequence[int]) -> ProcessGroup | None:
    """The group of these ranks; None on the others. Every rank must call this."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def probes(per_node: int) -> list[Probe]:
    """What is measured: inside a node, powers of two of ranks and all of them; across nodes the same in nodes.

    Across nodes also one rank of each node alone, and of two nodes: what a single group gets of the link.
    """
    world = dist.get_world_size()
    found = [Probe("node", size, contiguous(size)) for size in _sizes(2, per_node) if per_node > 1]
    across = [size for size in _sizes(2 * per_node, world) if world > per_node]
    found += [Probe("cluster", size, contiguous(size)) for size in across]
    if 1 < per_node < world:
        nodes = world // per_node
        for count in sorted({2, nodes} - set(across)):
            found.append(Probe("cluster", count, strided([per_node * node for node in range(count)])))
    return found


def _sizes(least: int, most: int) -> list[int]:
    """Doubled from `least` on, and `most`, those that divide it."""
    powers = [least << power for power in range(20) if least << power < most]
    return sorted({size for size in [*powers, most] if most % size == 0})


def slowest_of(seconds: Sequence[float]) -> list[float]:
    """Of each, the largest over all ranks."""
    together = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return [float(value) for value in together]


def slowest(seconds: float) -> float:
    """The largest over all ranks."""
    return slowest_of([seconds])[0]
