"""Cost model of a mixture-of-experts layer, from bytes and seconds of tokens and experts.

D devices, E experts, expert e owned by device e // (E / D). Source: Pro-Prophet (arXiv 2411.10003), performance
model, equations (6) and (8). Differences: a link is as busy with sends as with receives, so the larger of both
counts; links between nodes are counted separately; and parameters are sent in the two rounds of `oases.moe.transfer`,
which overlap where `oases.plans.expert_schedules.block_wise` has them: the first with non-expert compute, the second
with the experts. The paper takes the mean over the devices, and overlaps both with both (`transfer="mean"`). The
arithmetic is in csrc/experts.cpp, because a search evaluates it thousands of times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf, isfinite

from oases.errors import UsageError
from oases.extension import ExpertCosts

TRANSFERS = ("rounds", "mean")


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one mixture-of-experts layer.

    token_seconds: forward pass of one token through one expert. token_bytes: bytes of one token, one way.
    expert_bytes: bytes of an expert's parameters, and of its gradients. bandwidth: bytes per second of a device's
    link, one way. both_ways: bytes per second of both directions together; 0 for full duplex. latency: seconds to
    start a collective. non_expert_seconds: forward pass between this layer and the next one, with which parameter
    transfers may overlap. backward: duration of a backward pass in forward passes. scheduled: parameter and gradient
    transfers overlap with compute, (8); otherwise not, (6). devices_per_node: 0 for uniform devices; otherwise
    node_bandwidth, bytes per second, is shared by all devices of a node towards other nodes. transfer: "rounds", as
    oases sends parameters; "mean", as in the paper. handling_seconds: packing and unpacking of one expert that a
    device sends or holds a replica of, in both passes, which is never hidden and not in the paper (nor in "mean").
    fixed_seconds: of a layer in both passes for any placement: routing, token permutation, exchange of counts.
    leading: first layer of a stack, where the second round and the last of the gradients' overlap with nothing.
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


@lru_cache(maxsize=256)
def native_costs(costs: Costs, devices: int) -> ExpertCosts:
    """Costs of csrc/experts.cpp for this number of devices. UsageError where they are not whole nodes."""
    if costs.devices_per_node and devices % costs.devices_per_node:
        raise UsageError(
            f"costs: {devices} devices do not divide into nodes of {costs.devices_per_node}; change devices_per_node"
        )
    found = ExpertCosts()
    for item in fields(costs):
        if item.name != "transfer":
            setattr(found, item.name, getattr(costs, item.name))
    found.mean_transfer = costs.transfer == "mean"
    return found
