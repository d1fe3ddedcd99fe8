"""What collectives take without compute, by size, one after another: the slowest rank's median, and their link."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from oases.errors import UsageError
from oases.execution.clock import Clock
from oases.execution.group import ProcessGroup, group_rank, scheduler_of
from oases.profile.config import DTYPES, ProfileConfig
from oases.simulator.links import LinkModel, Sample, fit_link
from oases.simulator.program import Contention


@dataclass(frozen=True)
class Probe:
    """Groups of one size that communicate at once. mine: this rank's group; None where it has none."""

    scope: str
    ranks: int
    mine: ProcessGroup | None


def ranks_per_node(world: int, *, shaped: bool) -> int:
    """Return LOCAL_WORLD_SIZE; 1 on a single node whose ranks are joined by a shaped or simulated link.

    Such a link stands between all ranks, as if each were a node of its own.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:  # nodes of different sizes
        local = 1
    return 1 if local == world and shaped else local


def contiguous(size: int) -> ProcessGroup:
    """This rank's group of `size` ranks that follow one another; every rank must call this."""
    world, mine = dist.get_world_size(), None
    if size == world and dist.group.WORLD is not None:
        return dist.group.WORLD
    for first in range(0, world, size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            mine = group
    assert mine is not None, f"groups of {size} do not hold every one of {world} ranks"
    return mine


def strided(ranks: Sequence[int]) -> ProcessGroup | None:
    """The group of these ranks; None on the others. Every rank must call this."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def probes(per_node: int) -> list[Probe]:
    """What is measured: inside a node, powers of two of ranks and all of them; across nodes the same in nodes.

    Across nodes also one rank of each node alone, and of two nodes: what a single group gets of the link.
    """
    world = dist.get_world_size()
    found = [Probe("node", size, contiguous(size)) for size in _sizes(2, per_node) if per_node > 1]
    across = [size for size in _sizes(2 * per_node, world) if world > per_node]
    found += [Probe("cluster", size, contiguous(size)) for size in across]
    if 1 < per_node < world:
        nodes = world // per_node
        for count in sorted({2, nodes} - set(across)):
            found.append(Probe("cluster", count, strided([per_node * node for node in range(count)])))
    return found


def _sizes(least: int, most: int) -> list[int]:
    """Doubled from `least` on, and `most`, those that divide it."""
    powers = [least << power for power in range(20) if least << power < most]
    return sorted({size for size in [*powers, most] if most % size == 0})


def slowest_of(seconds: Sequence[float]) -> list[float]:
    """Of each, the largest over all ranks."""
    together = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return [float(value) for value in together]


def slowest(seconds: float) -> float:
    """The largest over all ranks."""
    return slowest_of([seconds])[0]


SMALLEST = 16 << 10
LEAST_LARGEST = 1 << 20
"""Bytes: bandwidth cannot be told from start-up by less."""
NUM_SIZES = 6
TRIES = 3
"""How often a link is measured before it is an error that its times do not grow with the bytes."""
_GROWTH = 4
"""Of repetitions and of the largest size, from one try to the next."""
_MOST_LARGEST = 64 << 20
"""Bytes: to what the largest size may grow by tries; what one takes by then is far above what other programs add."""
_BUDGET = 2.0
"""Seconds for the repetitions of one collective of one size; a slow link gets fewer of them."""
_TRAIN_BYTES, _TRAIN_SECONDS = 1 << 20, 0.1
"""Collectives follow one another until so much was sent, or so long. Many links let a burst pass at once after a
rest, which in a training step there is not; what comes before the trains that count uses it up."""


def sizes(config: ProfileConfig, attempt: int = 0) -> list[int]:
    """Bytes from the smallest to the largest activation of the profile, each a like factor above the one before.

    attempt: how often the link was measured before; each time the largest size grows.
    """
    activation = config.batch * config.sequence * config.hidden * DTYPES[config.dtype].itemsize
    largest = max(activation, LEAST_LARGEST)
    largest = max(largest, min(largest * _GROWTH**attempt, _MOST_LARGEST))
    factor = (largest / SMALLEST) ** (1 / (NUM_SIZES - 1))
    return [round(SMALLEST * factor**step) for step in range(NUM_SIZES)]


def collectives_of(probe: Probe) -> tuple[str, ...]:
    """What is measured of a probe's groups. Messages are for pairs of ranks, and a simulated link has none."""
    sums = ("all_reduce", "reduce_scatter", "all_gather")
    return (*sums, "send") if probe.ranks == 2 and dist.get_backend() != "sim" else sums


def fitted_link(measure: Callable[[int], list[Sample]], option: str) -> LinkModel:
    """The link that comes closest to what is measured, free of contention; every rank must call this.

    measure: takes the samples; given how often it did before. On a busy machine they may be noise that no bandwidth
    can be found in: they are then taken again. UsageError where that is so after TRIES times; option: what makes
    the sizes larger, for the message.
    """
    failed = ""
    for attempt in range(TRIES):
        link, failed = _fit(measure(attempt))
        if link is not None:
            return link
    raise UsageError(f"links, measured {TRIES} times: {failed}, with a larger {option}")


def _fit(samples: list[Sample]) -> tuple[LinkModel | None, str]:
    """Of all ranks: a link on every one of them or, on every one, None and why."""
    try:
        link, failed = fit_link(samples, Contention()), ""
    except ValueError as error:
        link, failed = None, str(error)
    everyone = [failed] * dist.get_world_size()
    dist.all_gather_object(everyone, failed)  # their samples are the same, but not always their arithmetic
    failed = next((each for each in everyone if each), "")
    return (None if failed else link), failed


class LinkBench:
    """Times collectives on one rank."""

    def __init__(self, config: ProfileConfig) -> None:
        self.config = config
        self._clock = Clock(torch.device(config.device))

    def sample(self, probe: Probe, collective: str, num_bytes: int, attempt: int = 0) -> Sample:
        """One collective of one size. Every rank must call this; those without a group stand by.

        attempt: how often the link was measured before and nothing found. There are then more repetitions, and the
        least counts, not their median: other programs only add to what a collective takes.
        """
        dtype = DTYPES[self.config.dtype]
        elements = -(-num_bytes // dtype.itemsize // probe.ranks) * probe.ranks
        run = self._prepared(probe, collective, elements)
        self._train(run, 1)  # connections are made by the first one
        one = self._train(run, 1)
        count = max(1, min(-(-_TRAIN_BYTES // num_bytes), int(_TRAIN_SECONDS / one)))
        first = self._train(run, count)
        repetitions = max(1, min(self.config.iterations * _GROWTH**attempt, int(_BUDGET / first)))
        times = [self._train(run, count) / count for _ in range(repetitions)]
        return Sample(collective, probe.ranks, elements * dtype.itemsize, min(times) if attempt else median(times))

    def _train(self, run: Callable[[], Any], count: int) -> float:
        """Seconds of `count` of them, one after another."""
        self._clock.synchronize()
        dist.barrier()
        start = self._clock.mark()
        for _ in range(count):
            run()
        end = self._clock.mark()
        self._clock.synchronize()
        return slowest(self._clock.seconds(start, end))

    def _prepared(self, probe: Probe, collective: str, elements: int) -> Callable[[], Any]:
        group = probe.mine
        if group is None:
            return lambda: None
        # Zeros stay zeros however often they are summed.
        whole = torch.zeros(elements, device=self.config.device, dtype=DTYPES[self.config.dtype])
        part = whole.new_zeros(elements // probe.ranks)
        if collective == "send":
            return lambda: _send(whole, group)
        scheduler = scheduler_of(group)
        tensors = {"all_reduce": (whole,), "reduce_scatter": (part, whole), "all_gather": (whole, part)}[collective]
        return lambda: scheduler.wait(getattr(scheduler, collective)(*tensors, "profile"))


def _send(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """From the first rank of a pair to the second."""
    first, second = dist.get_process_group_ranks(group)
    if group_rank(group) == 0:
        dist.send(tensor, second, group=group)
    else:
        dist.recv(tensor, first, group=group)
