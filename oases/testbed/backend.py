"""Backends of torch.distributed by name, with the simulated link `sim`.

The `sim` backend (csrc/sim_backend.h) delays every collective by its start-up plus bytes over bandwidth.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from oases.errors import UsageError
from oases.limits import short
from oases.testbed.link import UNITS


@dataclass(frozen=True)
class Backend:
    """A c10d backend by name; for `sim` with its start-up in seconds and bandwidth in bytes per second.

    single_process: one process represents all ranks and sends nothing; collectives only take the link's time. cuda:
    it moves tensors of GPUs, as NCCL does and `staged` may.
    """

    name: str = "gloo"
    startup_seconds: float = 0.0
    bandwidth: float = 0.0
    single_process: bool = False
    cuda: bool = False

    @staticmethod
    def parse(text: str) -> Backend:
        """Parse "gloo", "staged", "nccl" or "sim:alpha=20us,bandwidth=12GB/s[,single_process]". Raises UsageError.

        "alone" is the name of `single_process` in 0.1.0.
        """
        name, _, options = text.partition(":")
        if name in ("gloo", "staged", "nccl") and not options:
            return Backend(name)
        if name != "sim":
            raise UsageError(
                f"unknown backend {short(text)}; known are gloo, staged, nccl and sim:alpha=TIME,bandwidth=RATE, "
                "e.g. sim:alpha=20us,bandwidth=12GB/s"
            )
        items = [item for item in options.split(",") if item]
        flags = {"single_process", "alone"}.intersection(items)
        given = dict(item.partition("=")[::2] for item in items if item not in flags)
        if set(given) != {"alpha", "bandwidth"}:
            names = short(", ".join(given)) if given else "none"
            raise UsageError(f"backend {short(text)}: sim needs alpha and bandwidth, got {names}")
        return Backend("sim", _seconds(given["alpha"]), _rate(given["bandwidth"]), bool(flags))

    def activate(self) -> str:
        """Register the backend with torch.distributed; return the name for init_process_group."""
        if self.name == "sim":
            _register_sim(self)
        # NCCL does not take CPU tensors, in which ranks exchange times and settings.
        return "cpu:gloo,cuda:nccl" if self.name == "nccl" else self.name


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", text)
    if match is None:
        raise UsageError(f"alpha {short(text)} is not a time; give a number and ns, us, ms or s, e.g. 20us")
    seconds = float(match[1]) / {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}[match[2]]
    if seconds > 60:
        raise UsageError(f"alpha {short(text)} is out of range; a collective's start-up is at most 60s here")
    return seconds


def _rate(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit|[kmg]b/s)", text.lower())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"bandwidth {short(text)} is not a rate; give e.g. 12GB/s or 1gbit")
    return float(match[1]) * UNITS[match[2].removesuffix("/s")]


def _register_sim(backend: Backend) -> None:
    import torch.distributed as dist

    from oases.extension import sim_backend, single_process_backend

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        if backend.single_process:
            inner = single_process_backend(rank, size)
        else:
            inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        if not backend.startup_seconds and backend.bandwidth == math.inf:
            return inner  # a link without cost needs no sim_backend, whose thread takes host time
        return sim_backend(inner, backend.startup_seconds, backend.bandwidth)

    # Registered again on every call: one process may simulate several links in turn.
    if "sim" in dist.Backend.backend_list:
        dist.Backend.backend_list.remove("sim")
    if hasattr(dist.Backend, "SIM"):
        del dist.Backend.SIM
    dist.Backend.register_backend("sim", create, devices=["cpu", "cuda"])
