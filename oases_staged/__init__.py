"""The c10d backend `staged`: collectives through shared memory on one machine, and over gloo between machines.

Importing it makes `staged` known to torch.distributed: `init_process_group("staged")`. It needs nothing of oases. The
extension is loaded when a group is made.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["make_staged"]


def make_staged(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make the backend `staged` of a group: shared memory within a node, and sockets between nodes. Collective.

    Nodes are those of the launcher: torchrun, like oases, gives their number in GROUP_RANK and their ranks in
    LOCAL_WORLD_SIZE. Without these the ranks are taken to be on one machine, where the backend looks for itself.
    ValueError, on all ranks, where a node has another number of the group's ranks than others; DistBackendError where
    a rank does not come within the timeout.
    """
    from oases_staged.extension import nodes_backend, staged_backend

    if os.environ.get("LOCAL_WORLD_SIZE") in (None, os.environ.get("WORLD_SIZE")):
        return staged_backend(store, rank, size, timeout)
    nodes = _nodes(store, rank, size, timeout)
    if len(nodes) == 1:
        return staged_backend(store, rank, size, timeout)
    counts = [len(ranks) for ranks in nodes]
    if len(set(counts)) > 1:
        raise ValueError(
            f"staged joins as many ranks of each node, and this group has {', '.join(map(str, counts))} of them; use "
            "gloo for it"
        )
    whole = dist.ProcessGroupGloo(dist.PrefixStore("whole", store), rank, size, timeout)
    node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    place = nodes[node].index(rank)
    local = staged_backend(dist.PrefixStore(f"node {node}", store), place, counts[0], timeout, nodes[node])
    return nodes_backend(whole, local, nodes)


def _nodes(store: dist.Store, rank: int, size: int, timeout: timedelta) -> list[list[int]]:
    """Ranks of each node, in the order of their first ranks."""
    store.set(f"node of {rank}", os.environ.get("GROUP_RANK") or socket.gethostname())
    keys = [f"node of {each}" for each in range(size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = ", ".join(str(each) for each, key in enumerate(keys) if not store.check([key]))
        raise dist.DistBackendError(f"staged: timed out waiting for rank {missing} to join") from error
    nodes: dict[bytes, list[int]] = {}
    for each, key in enumerate(keys):
        nodes.setdefault(store.get(key), []).append(each)
    return list(nodes.values())


if dist.is_available() and "staged" not in dist.Backend.backend_list:
    dist.Backend.register_backend("staged", make_staged, devices=["cpu", "cuda"])
