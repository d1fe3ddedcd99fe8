"""A slow cluster on one machine, in two ways.

A private network namespace whose loopback is shaped to a link's rate: every byte between ranks pays a commodity
link's price, and everything vanishes with the process. Linux only, no root needed. Or the `sim` backend
(csrc/sim_backend.h): the same clock anywhere, as start-up plus bytes over bandwidth.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oases.errors import UsageError

# As seen by the re-launched process: the rate its loopback is shaped to.
INSIDE = "OASES_TESTBED_LINK"

_UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_SHAPE = 'ip link set lo up && tc qdisc add dev lo root tbf rate "$1" burst 256kb latency 200ms'


def link_bytes_per_second(rate: str) -> float:
    """Bytes per second of a link rate such as "500mbit" or "1gbit"; UsageError where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"unknown link rate {rate!r}; give a number and kbit, mbit or gbit, e.g. 500mbit")
    bytes_per_second = float(match[1]) * _UNITS[match[2]]
    if not 1e3 <= bytes_per_second <= 12.5e9:
        raise UsageError(f"link rate {rate!r} is out of range; give one between 8kbit and 100gbit")
    return bytes_per_second


def inside(rate: str) -> bool:
    """Whether this process was re-launched behind a link of this rate already."""
    return os.environ.get(INSIDE) == rate


def _environment() -> dict[str, str]:
    # ip and tc live where a plain user's PATH does not look.
    return os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}


def why_impossible(rate: str) -> str | None:
    """Why no shaped link can be made here, with the remedy; None if it can."""
    link_bytes_per_second(rate)
    path = _environment()["PATH"]
    if not sys.platform.startswith("linux"):
        return f"a shaped link needs Linux network namespaces, and this is {sys.platform}"
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool, path=path) is None:
            return f"'{tool}' is missing; install the package {package}"
    probe = subprocess.run(
        ["unshare", "-rn", "sh", "-c", _SHAPE, "sh", rate],
        env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode == 0:
        return None
    reason = probe.stderr.strip().splitlines()[-1] if probe.stderr.strip() else f"exit {probe.returncode}"
    return (
        f"a private network namespace was refused ({reason}); allow unprivileged user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0 on "
        "Ubuntu) and load the kernel module sch_tbf"
    )


def relaunch(rate: str, arguments: Sequence[str]) -> None:
    """Replace this process by `python -m oases ARGUMENTS` behind a loopback of `rate`. Does not return."""
    # Not -m: that would look for the package in the current folder first, where a source tree may lie.
    start = "import sys; sys.path[:] = [p for p in sys.path if p]; from oases.cli import main; main()"
    command = [sys.executable, "-c", start, *arguments]
    environment = _environment() | {INSIDE: rate, "GLOO_SOCKET_IFNAME": "lo"}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no names are resolved in here; c10d would say so
    sys.stdout.flush()
    shell = f'{_SHAPE} && shift && exec "$@"'
    os.execvpe("unshare", ["unshare", "-rn", "sh", "-c", shell, "sh", rate, *command], environment)


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
    return float(match[1]) * _UNITS[match[2].removesuffix("/s")]


def _register_sim(backend: Backend) -> None:
    import torch.distributed as dist

    import oases._C as _C

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        inner = _C.lonely_backend(rank, size) if backend.alone else dist.ProcessGroupGloo(store, rank, size, timeout)
        return _C.sim_backend(inner, backend.startup_seconds, backend.bandwidth)

    # Registered anew each time: one process may simulate one link after another.
    dist.Backend.backend_list = [name for name in dist.Backend.backend_list if name != "sim"]
    if hasattr(dist.Backend, "SIM"):
        del dist.Backend.SIM
    dist.Backend.register_backend("sim", create, devices=["cpu", "cuda"])
