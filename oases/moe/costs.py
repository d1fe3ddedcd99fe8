"""What a step of a mixture-of-experts layer costs, as bytes and seconds of tokens and experts.

D devices, E experts, expert e at home on device e // (E / D). Source: Pro-Prophet (arXiv 2411.10003), section on the
performance model, equations (6) and (8). What is different: a rank's link is as busy with what it sends as with what
it receives, so the larger of both counts; the links between nodes are counted apart; and parameters travel as
`oases.moe.transfer` sends them, in two rounds, each of which hides where `oases.schedule.experts.block_wise` has it:
the first under what is no expert's, the second under the experts. The paper has the mean over the devices, and both
under both (`transfer="mean"`).
The arithmetic is csrc/experts.cpp's, which a search goes through some thousand times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf, isfinite
from typing import Any

from oases.errors import UsageError

TRANSFERS = ("rounds", "mean")


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one mixture-of-experts layer.

    token_seconds: forward pass of one token through one expert. token_bytes: one token on the wire, one way.
    expert_bytes: parameters of an expert, and so its gradients. bandwidth: bytes per second of a device's link, one
    way. both_ways: of both ways together; 0 for a link that is as fast each way at once. latency: seconds until a
    collective begins to move bytes. non_expert_seconds: forward pass of what lies between this layer and the next
    one, under which parameters may travel. backward: a backward pass in forward passes. scheduled: parameters and
    gradients travel under compute, (8); else nothing else runs meanwhile, (6). devices_per_node: 0 for devices that
    are all alike; else node_bandwidth, bytes per second, is what all devices of a node share towards the others.
    transfer: "rounds", as oases sends parameters; "mean", as the paper counts. handling_seconds: what packing and
    unpacking takes of one expert that a device sends or holds a copy of, in both passes, which nothing hides and the
    paper does not count ("mean" neither). fixed_seconds: of a layer in both passes, whatever is placed where: the
    choice of experts, the order of tokens, the exchange of counts. leading: the first layer of a stack, where the
    second round and the last of the gradients' have nothing to hide under.
    UsageError for a value that is negative or not finite.
    """

    token_seconds: float
    token_bytes: float
    expert_bytes: float
    bandwidth: float
    latency: float = 0.0
    non_expert_seconds: float = 0.0
    backward: float = 2.0
    scheduled: bool = True
    devices_per_node: int = 0
    node_bandwidth: float = inf
    transfer: str = "rounds"
    handling_seconds: float = 0.0
    fixed_seconds: float = 0.0
    leading: bool = False
    both_ways: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            endless = item.name == "node_bandwidth"
            if isinstance(value, float | int) and not (value >= 0 and (endless or isfinite(value))):
                raise UsageError(f"costs: {item.name} must be at least 0 and finite, got {value}")
        for name in ("bandwidth", "node_bandwidth"):
            if getattr(self, name) == 0:
                raise UsageError(f"costs: {name} must be above 0 bytes per second, got 0")
        if self.transfer not in TRANSFERS:
            raise UsageError(f"costs: unknown transfer {self.transfer!r}; known are {', '.join(TRANSFERS)}")

    def native(self, devices: int) -> Any:
        """For csrc/experts.cpp, of so many devices. UsageError where they are no whole nodes."""
        return _native(self, devices)


@lru_cache(maxsize=256)
def _native(costs: Costs, devices: int) -> Any:
    import torch  # noqa: F401  (the extension finds torch's libraries only once torch is loaded)

    from oases._C import ExpertCosts

    if costs.devices_per_node and devices % costs.devices_per_node:
        raise UsageError(
            f"costs: {devices} devices are no whole nodes of {costs.devices_per_node}; change devices_per_node"
        )
    found = ExpertCosts()
    for item in fields(costs):
        if item.name != "transfer":
            setattr(found, item.name, getattr(costs, item.name))
    found.mean_transfer = costs.transfer == "mean"
    return found
