"""Measurement of a layer's costs on all ranks at once, for a planner without given costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from oases.core.execution.communication import WireType
from oases.core.execution.group import ProcessGroup, group_size, scheduler_of
from oases.distributed.clock import Clock, timed
from oases.distributed.collectives import all_reduce
from oases.moe.costs import Costs
from oases.moe.dispatch import wire_bytes
from oases.moe.experts import ExpertWeights
from oases.moe.forward import Run
from oases.moe.placement import Placement, owner_only
from oases.moe.transfer import Transfer

ROWS = 128
"""Maximum tokens of the measured expert."""
BYTES = 8 << 20
"""Bytes of the measured all-to-all per rank: more than the burst of a traffic shaper."""
TIMES = 5
PAUSE = 1.5
"""Pause after a part of a measured transfer, in seconds that it is on the wire."""


@torch.no_grad()
def measure_costs(
    weights: ExpertWeights, tokens: int, run: Run, group: ProcessGroup, label: str, *, hidden: int = 0,
    wire: WireType | None = None, known: dict[Any, Costs] | None = None,
) -> Costs:  # fmt: skip
    """Costs of a layer without overlap: medians of a few runs, averaged over the ranks, so equal on all.

    weights: of the owned experts. tokens: per owned expert in a call of this rank. run: function of the experts.
    hidden: length of a token; 0: as `up` tells. wire: type in which tokens are sent; None: their own. known: costs by
    sizes of the experts, for layers of one group that share a measurement.
    """
    known = {} if known is None else known
    sizes = (wire, *((weight.shape, weight.dtype) for weight in weights.given))
    if sizes in known:
        return known[sizes]
    like, size, scheduler = weights.up, group_size(group), scheduler_of(group)
    hidden = hidden or like.shape[2]
    rows = like.new_ones((max(1, min(ROWS, tokens)), hidden))
    one = weights.like([weight[:1] for weight in weights.given])

    def all_to_all(sent: list[int], received: list[int]) -> Callable[[], object]:
        going, coming = like.new_zeros(sum(sent)), like.new_empty(sum(received))
        return lambda: scheduler.wait(scheduler.all_to_all(coming, going, sent, received, f"measuring of {label}"))

    def seconds(act: Callable[[], object], *, largest: bool = False) -> float:
        return measured_seconds(act, like.device, group, label, largest=largest)

    numbers = BYTES // like.element_size()
    everyone = [max(1, numbers // size)] * size
    one_way: tuple[list[int], list[int]] = ([0] * size, [0] * size)  # from each even rank to the next
    if scheduler.rank ^ 1 < size:
        one_way[scheduler.rank % 2][scheduler.rank ^ 1] = numbers // 2
    token = seconds(lambda: run(rows, [len(rows)], one)) / len(rows)
    latency = seconds(all_to_all([1] * size, [1] * size))
    whole = seconds(all_to_all(everyone, everyone))
    alone = seconds(all_to_all(*one_way), largest=True)  # the sender finishes before the receiver

    def rate(sent: float, seconds: float) -> float:
        return sent / max(seconds - latency, 0.1 * seconds, 1e-9)

    each_way = rate(BYTES * (size - 1) / size, whole)
    costs = Costs(
        token_seconds=token, token_bytes=hidden * wire_bytes(like.dtype, wire),
        expert_bytes=sum(weight[:1].nbytes for weight in weights.given), latency=latency, scheduled=False,
        bandwidth=max(each_way, rate(BYTES / 2, alone)), both_ways=2 * each_way,
    )  # fmt: skip
    known[sizes] = replace(costs, handling_seconds=handling_seconds(weights, costs, group, label))
    return known[sizes]


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
    return _agreed(seconds, clock.device, group, label) / (
        sent + number * sent
    )  # experts that a rank sends and holds


@torch.no_grad()
def measured_seconds(
    act: Callable[[], object], device: torch.device, group: ProcessGroup, label: str, *, largest: bool = False
) -> float:
    """Seconds of `act`, which all ranks run at once: a median, averaged over the ranks, so equal on all.

    largest: of the slowest rank instead.
    """
    found = [timed(act, device) for _ in range(TIMES + 1)]
    return _agreed(statistics.median(found[1:]), device, group, label, largest=largest)


def _agreed(seconds: float, device: torch.device, group: ProcessGroup, label: str, *, largest: bool = False) -> float:
    mine = torch.tensor([seconds], dtype=torch.float64, device=device)
    found = float(all_reduce(mine, group, f"measuring of {label}", largest=largest))
    return found if largest else found / group_size(group)
