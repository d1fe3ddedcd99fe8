"""Mutual slowdown of compute and collectives: each alone, and each while the other runs throughout."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases.core.execution.communication import NullScheduler
from oases.core.execution.group import ProcessGroup, scheduler_of
from oases.core.schedule import generate
from oases.profile.compute import BlockBench
from oases.profile.links import slowest
from oases.simulator.program import Contention

_CHAIN = 0.1
"""Seconds of compute timed at once: much more than start-up and stop take."""
_BUFFERS = 4
_LEAST_BYTES = 1 << 20
"""Minimum bytes of a collective: smaller ones would end while others are being started."""
_CHAIN_TRAIN = 100
"""Maximum duration of the compute chain in collectives, to limit the number in flight."""
_MOST = 1000
"""Collectives in flight at once."""
_DOUBLINGS = 6


class ContentionBench:
    """Times a chain of compute steps and a train of all-reduces of `group`, alone and together, on one rank."""

    def __init__(self, bench: BlockBench, group: ProcessGroup) -> None:
        self._bench = bench
        self._clock = bench.clock
        self._scheduler = scheduler_of(group)
        # Zeros stay zeros however often they are summed, so few buffers suffice for a train of any length.
        elements = max(bench.x.numel(), _LEAST_BYTES // bench.x.itemsize)
        self._buffers = [bench.x.new_zeros(elements) for _ in range(_BUFFERS)]
        self._aside: Any = None if bench.x.device.type == "cpu" else torch.Stream(bench.x.device)

    def measure(self) -> Contention:
        """Slowdown factors from the slowest rank's medians. Collective: every rank must call this."""
        config, bench = self._bench.config, self._bench
        bench.stack.run_as(generate("oases", 2 * config.layers, min(2, config.batch)))
        self._together(1, 0)  # warm-up
        self._together(0, 2)
        step, carried = self._together(1, 0)[0], self._together(0, 4)[1] / 4
        steps = max(1, math.ceil(min(_CHAIN, _CHAIN_TRAIN * carried) / step))
        trains = max(1, min(_MOST, round(0.5 * steps * step / carried)))
        found: dict[str, list[float]] = {"compute": [], "link": []}
        for _ in range(config.iterations):  # interleaved, so that disturbances affect all equally
            chain = self._together(steps, 0)[0]
            slowed = self._until(
                lambda number: self._together(steps, number), math.ceil(1.5 * steps * step / carried) + 2, _MOST
            )
            found["compute"].append(slowed[0] / chain)
            train = self._together(0, trains)[1]
            slowed = self._until(
                lambda number: self._together(number, trains, compute_outlasts=True),
                math.ceil(1.5 * trains * carried / step) + 1, 1 << 20,
            )  # fmt: skip
            found["link"].append(slowed[1] / train)
        return Contention(max(1.0, median(found["compute"])), max(1.0, median(found["link"])))

    def _until(
        self, run: Callable[[int], tuple[float, float, bool]], number: int, most: int
    ) -> tuple[float, float, bool]:
        """Repeat with more of the longer work until it outlasts the other on every rank."""
        result = run(min(number, most))
        for _ in range(_DOUBLINGS):
            if result[2] or number >= most:
                break
            number *= 2
            result = run(min(number, most))
        return result

    def _together(self, steps: int, trains: int, *, compute_outlasts: bool = False) -> tuple[float, float, bool]:
        """Seconds of the compute and of the collectives on the slowest rank; whether one outlasted the other."""
        self._clock.synchronize()
        dist.barrier()
        start = self._clock.mark()
        tickets = [self._scheduler.all_reduce(self._buffers[n % _BUFFERS], "profile") for n in range(trains)]
        started = self._clock.mark()
        for _ in range(steps):
            self._step()
        computed = self._clock.mark()
        carried = self._waited(tickets) if tickets else computed
        self._clock.synchronize()
        after = self._clock.seconds(computed, carried)
        outlasted = after <= 0 if compute_outlasts else after >= 0
        missed = slowest(0.0 if outlasted else 1.0)
        return (
            slowest(self._clock.seconds(started, computed)),
            slowest(self._clock.seconds(start, carried)),
            not missed,
        )

    def _step(self) -> None:
        x = self._bench.x.detach().requires_grad_()
        self._bench.stack.zero_grad()
        output: Tensor = self._bench.stack.run(x, NullScheduler())
        output.backward(self._bench.grad)

    def _waited(self, tickets: list[Any]) -> Any:
        """End time of the last collective."""
        if self._aside is None:
            for ticket in tickets:
                self._scheduler.wait(ticket)
            return max(ticket.record.finished for ticket in tickets)
        with self._aside:  # the compute's own stream must not wait
            for ticket in tickets:
                self._scheduler.wait(ticket)
            return self._clock.mark()
