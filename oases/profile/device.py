"""What one rank computes with: its name, its memory, and what large products and copies reach."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from oases.execution.clock import Clock
from oases.profile.config import DTYPES, ProfileConfig
from oases.profile.groups import slowest
from oases.simulator.hardware import Device

_PRODUCT = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def device_name(device: str) -> str:
    """The accelerator's name, or the processor's."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(device: str, ranks_here: int) -> int:
    """Of the accelerator, or a rank's part of the machine's."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here


def measure_device(config: ProfileConfig) -> Device:
    """Rates with all ranks at work at once; every rank must call this."""
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    clock = Clock(device)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    ranks_here = hosts.count(socket.gethostname())  # they share its memory, whatever nodes they stand for
    size = _PRODUCT[config.device]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    flops = 2 * size**3 / _seconds(clock, lambda: a @ b, config.iterations)
    source = torch.zeros(_COPY_BYTES[config.device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes / _seconds(clock, lambda: target.copy_(source), config.iterations)
    small = torch.zeros(1, device=device)
    launch = _seconds(clock, lambda: [small.add_(1) for _ in range(1000)], config.iterations) / 1000
    return Device(
        device_name(config.device), memory_bytes(config.device, ranks_here), {config.dtype: flops}, moved, launch
    )


def _seconds(clock: Clock, work: Callable[[], Any], iterations: int) -> float:
    times = []
    for _ in range(iterations + 1):
        clock.synchronize()
        dist.barrier()
        start = clock.mark()
        work()
        end = clock.mark()
        clock.synchronize()
        times.append(slowest(clock.seconds(start, end)))
    return median(times[1:])
