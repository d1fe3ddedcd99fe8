"""Measurement of a layer's costs on all ranks at once, for a planner without given costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from oases.core.execution.communication import WireType
from oases.core.execution.executor import synchronize
from oases.core.execution.group import ProcessGroup, group_size, scheduler_of
from oases.distributed.clock import Clock
from oases.distributed.collectives import all_reduce
from oases.moe.costs import Costs
from oases.moe.dispatch import wire_bytes
from oases.moe.experts import ExpertWeights, compute
from oases.moe.placement_data import Placement, owner_only
from oases.moe.transfer import Transfer

ROWS = 128
"""Maximum tokens of the measured expert."""
BYTES = 8 << 20
"""Bytes of the measured all-to-all per rank: more than the burst of a traffic shaper."""
TIMES = 5
PAUSE = 1.5
"""Pause after a part of a measured transfer, in seconds that it is on the wire."""

Run = Callable[[torch.Tensor, list[int], ExpertWeights], torch.Tensor]


@torch.no_grad()
def measure_costs(
    weights: ExpertWeights, tokens: int, run: bool | Run, group: ProcessGroup, label: str, hidden: int = 0,
    wire: WireType | None = None,
) -> Costs:  # fmt: skip
    """Costs of a layer without overlap: medians of a few runs, averaged over the ranks, so equal on all.

    weights: of the owned experts. tokens: per owned expert in a call of this rank. run: whether the experts are
    gated, or their function, as `compute` with rows, counts and weights. hidden: length of a token; 0: as `up` tells.
    wire: type in which tokens are sent; None: their own.
    """
    like = weights.up
    size, hidden = group_size(group), hidden or like.shape[2]
    act = partial(compute, gated=run) if isinstance(run, bool) else run
    scheduler = scheduler_of(group)
    rows = like.new_ones((max(1, min(ROWS, tokens)), hidden))
    one = weights.like([weight[:1] for weight in weights.given])

    def exchange(numbers: int) -> Callable[[], object]:
        part = max(1, numbers // size)
        going, coming = like.new_zeros(part * size), like.new_empty(part * size)
        splits = [part] * size
        return lambda: scheduler.wait(scheduler.all_to_all(coming, going, splits, splits, f"measuring of {label}"))

    def one_way(numbers: int) -> Callable[[], object]:
        """All-to-all from each even rank to the next."""
        rank, splits = scheduler.rank, ([0] * size, [0] * size)
        if rank ^ 1 < size:
            splits[rank % 2][rank ^ 1] = numbers
        going, coming = (like.new_zeros(sum(split)) for split in splits)
        return lambda: scheduler.wait(scheduler.all_to_all(coming, going, *splits, f"measuring of {label}"))

    numbers = BYTES // like.element_size()
    token = _seconds(lambda: act(rows, [len(rows)], one), like.device) / len(rows)
    latency = _seconds(exchange(size), like.device)
    whole = _seconds(exchange(numbers), like.device)
    alone = _seconds(one_way(numbers // 2), like.device)
    mine = torch.tensor([token, latency, whole, alone], dtype=torch.float64, device=like.device)
    everyone = mine.new_empty((size, len(mine)))
    scheduler.wait(scheduler.all_gather(everyone, mine, f"measuring of {label}"))
    token, latency, whole, _ = everyone.mean(0).tolist()
    alone = everyone[:, 3].max().item()  # the sender finishes before the receiver

    def rate(sent: float, seconds: float) -> float:
        return sent / max(seconds - latency, 0.1 * seconds, 1e-9)

    each_way = rate(BYTES * (size - 1) / size, whole)
    bandwidth = max(each_way, rate(BYTES / 2, alone))
    costs = Costs(
        token_seconds=token,
        token_bytes=hidden * wire_bytes(like.dtype, wire),
        expert_bytes=sum(weight[:1].nbytes for weight in weights.given),
        bandwidth=bandwidth,
        both_ways=2 * each_way,
        latency=latency,
        scheduled=False,
    )
    return replace(costs, handling_seconds=handling_seconds(weights, costs, group, label))


@torch.no_grad()
def handling_seconds(weights: ExpertWeights, costs: Costs, group: ProcessGroup, label: str) -> float:
    """Measure `Costs.handling_seconds`: send experts of every rank to the next two ranks and gradients back.

    costs: of the link, which say how long to pause after each part, in the place of the compute that hides what it
    started; the parts themselves are what nothing hides. As many experts are sent as are BYTES, at least one.
    """
    size, local = group_size(group), len(weights.up)
    experts = size * local
    routes, _ = owner_only(np.zeros((experts, size), dtype=np.int64))
    number, sent = min(2, size - 1), max(1, min(local, int(BYTES // max(costs.expert_bytes, 1))))
    copies = tuple(
        tuple(sorted((e // local + k) % size for k in range(1, 1 + number))) if e % local < sent else ()
        for e in range(experts)
    )
    transfer = Transfer(weights, Placement("measured", copies, routes, np.zeros(size, np.int64), 0.0), group, label)
    pause = PAUSE * (2 * sent * costs.expert_bytes / (costs.both_ways or 2 * costs.bandwidth) + costs.latency)
    clock = Clock(weights.up.device)
    parts: tuple[Callable[[], object], ...] = (
        lambda: transfer.scatter(weights.given),
        transfer.exchange,
        lambda: transfer.reduce(transfer.finish()),
        transfer.gather,
        lambda: transfer.collect(transfer.zeros()),
    )

    def there_and_back() -> float:
        seconds = 0.0
        for part in parts:
            start = clock.mark()
            part()
            seconds += clock.seconds(start, clock.mark())
            time.sleep(pause)
        return seconds

    seconds = statistics.median([there_and_back() for _ in range(TIMES + 1)][1:])
    return _mean(seconds, clock.device, group, label) / (sent + number * sent)  # experts that a rank sends and holds


@torch.no_grad()
def mean_seconds(act: Callable[[], object], device: torch.device, group: ProcessGroup, label: str) -> float:
    """Seconds of `act`, which all ranks run at once: a median, averaged over the ranks, so equal on all."""
    return _mean(_seconds(act, device), device, group, label)


def _mean(seconds: float, device: torch.device, group: ProcessGroup, label: str) -> float:
    mine = torch.tensor([seconds], dtype=torch.float64, device=device)
    return float(all_reduce(mine, group, f"measuring of {label}")) / group_size(group)


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(TIMES + 1):
        synchronize(device)
        start = time.perf_counter()
        act()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
