"""Backends of torch.distributed by name, the simulated link among them.

The `sim` backend (csrc/sim_backend.h) is a link's clock anywhere, as start-up plus bytes over bandwidth.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from oases.errors import UsageError
from oases.testbed.link import UNITS


@dataclass(frozen=True)
class Backend:
    """A c10d backend by name; for `sim` with its start-up in seconds and bandwidth in bytes per second.

    alone: one process stands for all ranks and sends nothing; only the time of the link passes.
    """

    name: str = "gloo"
    startup_seconds: float = 0.0
    bandwidth: float = 0.0
    alone: bool = False

    @staticmethod
    def parse(text: str) -> Backend:
        """Read "gloo", "nccl" or "sim:alpha=20us,bandwidth=12GB/s[,alone]"; UsageError names what is wrong."""
        name, _, options = text.partition(":")
        if name in ("gloo", "nccl") and not options:
            return Backend(name)
        if name != "sim":
            raise UsageError(
                f"unknown backend {text!r}; known are gloo, nccl and sim:alpha=TIME,bandwidth=RATE, "
                "e.g. sim:alpha=20us,bandwidth=12GB/s"
            )
        items = [item for item in options.split(",") if item]
        alone = "alone" in items
        given = dict(item.partition("=")[::2] for item in items if item != "alone")
        if set(given) != {"alpha", "bandwidth"}:
            raise UsageError(f"backend {text!r}: sim needs alpha and bandwidth, got {', '.join(given) or 'none'}")
        return Backend("sim", _seconds(given["alpha"]), _rate(given["bandwidth"]), alone)

    def activate(self) -> str:
        """Make the backend known to torch.distributed; return the name for init_process_group."""
        if self.name == "sim":
            _register_sim(self)
        # NCCL takes no tensors of the CPU, in which ranks exchange times and settings.
        return "cpu:gloo,cuda:nccl" if self.name == "nccl" else self.name


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", text)
    if match is None:
        raise UsageError(f"alpha {text!r} is no time; give a number and ns, us, ms or s, e.g. 20us")
    seconds = float(match[1]) / {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}[match[2]]
    if seconds > 60:
        raise UsageError(f"alpha {text!r} is out of range; a collective's start-up is at most 60s here")
    return seconds


def _rate(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit|[kmg]b/s)", text.lower())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"bandwidth {text!r} is no rate; give e.g. 12GB/s or 1gbit")
    return float(match[1]) * UNITS[match[2].removesuffix("/s")]


def _register_sim(backend: Backend) -> None:
    import torch.distributed as dist

    import oases._C as _C

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        inner = _C.lonely_backend(rank, size) if backend.alone else dist.ProcessGroupGloo(store, rank, size, timeout)
        if not backend.startup_seconds and backend.bandwidth == math.inf:
            return inner  # a link that takes no time needs no clock, whose thread would cost the host some
        return _C.sim_backend(inner, backend.startup_seconds, backend.bandwidth)

    # Registered anew each time: one process may simulate one link after another.
    dist.Backend.backend_list = [name for name in dist.Backend.backend_list if name != "sim"]
    if hasattr(dist.Backend, "SIM"):
        del dist.Backend.SIM
    dist.Backend.register_backend("sim", create, devices=["cpu", "cuda"])
