"""Result of the overlap measurement: medians, shares of the ideal, and where the time of the compute thread goes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oases.core.blocks.chooser import label
from oases.core.schedule import Schedule
from oases.profile.config import OverlapConfig
from oases.profile.memory import StepMemory, formula_units

PEER, BESIDE = "peer ", "side by side, "
"""Prefixes of contestants' names: of peers, and of compute alone beside sums."""
_COMPUTE, _COMMUNICATION = ("compute alone", "compute alone, cut"), "communication alone"

Passes = tuple[float, float]
"""Seconds of the forward and of the backward pass."""


class CoreTime(NamedTuple):
    """Seconds of the compute thread in a step, which add up to the step.

    on_core: it ran, or the kernel served interrupts in its place. displaced: it was ready, and other threads had its
    core, such as those of the collectives. asleep: it waited, for a sum or for threads that compute with it.
    """

    on_core: float
    displaced: float
    asleep: float


def core_clock() -> tuple[float, float, float]:
    """Wall clock, and this thread's time on a core and ready for one, seconds; nan where the kernel counts none."""
    wall = time.perf_counter()
    try:
        on_core, ready, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:  # not Linux, or a kernel without CONFIG_SCHED_INFO
        on_core = ready = "0"
    if on_core == "0":  # a kernel that has it off
        return wall, math.nan, math.nan
    return wall, int(on_core) / 1e9, int(ready) / 1e9


@dataclass(frozen=True)
class Facts:
    """Properties of a schedule found before timing. unit: bytes of the stack's input on one rank."""

    schedule: Schedule
    gradient_error: float
    all_reduces_per_layer: float
    memory: StepMemory
    unit: int


def median_of(passes: Sequence[Passes]) -> tuple[float, float, float]:
    """Median seconds of the forward pass, of the backward pass, and of both."""
    forward, backward = zip(*passes, strict=True)
    return statistics.median(forward), statistics.median(backward), statistics.median(f + b for f, b in passes)


def least_compute(times: Mapping[str, Sequence[Passes]], prefix: str = "") -> tuple[float, float, float]:
    """`median_of` compute alone: of the whole batch or of sub-batches, whichever is faster."""
    return median_of(times[_faster(times, prefix)])


def core_seconds(
    cores: Mapping[str, Sequence[CoreTime]], times: Mapping[str, Sequence[Passes]]
) -> dict[str, dict[str, float]] | None:
    """Mean `CoreTime` of the faster compute alone, of the faster side by side, of schedules and of peers, by name.

    None where the kernel does not count it.
    """
    alone = {_faster(times): "compute alone", _faster(times, BESIDE): "side by side"}
    others = (_COMMUNICATION, *(prefix + name for prefix in ("", BESIDE) for name in _COMPUTE))
    rest = {name: name.removeprefix(PEER) for name in times if name not in others}
    found = {
        shown: CoreTime(*(statistics.mean(part) for part in zip(*cores[name], strict=True)))._asdict()
        for name, shown in (alone | rest).items()
    }
    return None if any(math.isnan(each["on_core"]) for each in found.values()) else found


def _faster(times: Mapping[str, Sequence[Passes]], prefix: str = "") -> str:
    """Compute alone of the whole batch or of sub-batches, by name, whichever is faster."""
    return min((prefix + name for name in _COMPUTE), key=lambda name: median_of(times[name])[2])


def summarize(
    config: OverlapConfig,
    degree: int,
    times: dict[str, list[Passes]],
    facts: dict[str, Facts],
) -> dict[str, Any]:
    """Medians and shares in seconds and bytes. `hidden` is null if sync is ideal: nothing is left to hide."""

    communication, compute = median_of(times[_COMMUNICATION]), least_compute(times)
    ideal = max(compute[0], communication[0]) + max(compute[1], communication[1])
    sync = median_of(times["sync"])[2]
    schedules: dict[str, dict[str, Any]] = {}
    for name, fact in facts.items():
        forward, backward, step = median_of(times[name])
        schedules[name] = {
            "step_seconds": step,
            "forward_seconds": forward,
            "backward_seconds": backward,
            "speedup": sync / step,
            "hidden": (sync - step) / (sync - ideal) if sync > ideal else None,
            "of_ideal": ideal / step,
            "all_reduces_per_layer": fact.all_reduces_per_layer,
            "max_relative_gradient_error": fact.gradient_error,
            "kept_bytes": fact.memory.kept,
            "kept_units": fact.memory.kept / (fact.unit * config.layers),
            "peak_bytes": fact.memory.peak,
            "formula_units": formula_units(fact.schedule),
        }
        if name == "auto":
            schedules[name]["chosen"] = label(fact.schedule)
            schedules[name]["slower_than_sync"] = step / sync
    peers = {}
    for name in (name.removeprefix(PEER) for name in times if name.startswith(PEER)):
        forward, backward, step = median_of(times[PEER + name])
        peers[name] = {"step_seconds": step, "forward_seconds": forward, "backward_seconds": backward}
    return {
        "config": asdict(config) | {"tp": degree},
        "compute_seconds": compute[2],
        "communication_seconds": communication[2],
        "communication_over_compute": communication[2] / compute[2],
        "ideal_seconds": ideal,
        "side_by_side_seconds": least_compute(times, BESIDE)[2],
        "schedules": schedules,
        "peers": peers,
    }
