"""Timing of collectives without compute, by size: medians of the slowest rank, and the link model fitted to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, scheduler_of
from oases.distributed.clock import Clock
from oases.errors import UsageError
from oases.profile.config import DTYPES, ProfileConfig
from oases.simulator.links import LinkModel, Sample, fit_link
from oases.simulator.program import Contention


@dataclass(frozen=True)
class Probe:
    """Groups of one size that communicate at once. mine: this rank's group; None if it has none."""

    scope: str
    ranks: int
    mine: ProcessGroup | None


def ranks_per_node(world: int, *, shaped: bool) -> int:
    """Return LOCAL_WORLD_SIZE; 1 on a single node whose ranks are joined by a shaped or simulated link.

    Such a link connects all ranks as if each were a node of its own.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:  # nodes of unequal size
        local = 1
    return 1 if local == world and shaped else local


def contiguous(size: int) -> ProcessGroup:
    """This rank's group of `size` consecutive ranks. Collective: every rank must call this."""
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
    """Group of these ranks; None on other ranks. Collective: every rank must call this."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def probes(per_node: int) -> list[Probe]:
    """Groups to measure: inside a node powers of two and all ranks; across nodes the same in nodes.

    Across nodes also one rank per node, and per two nodes: the link as seen by a single group.
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
    """Divisors of `most` among `least` times powers of two, and `most`."""
    powers = [least << power for power in range(20) if least << power < most]
    return sorted({size for size in [*powers, most] if most % size == 0})


def slowest_of(seconds: Sequence[float]) -> list[float]:
    """Element-wise maximum over all ranks."""
    together = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return [float(value) for value in together]


def median_of_slowest(seconds: Sequence[float], group: ProcessGroup) -> float:
    """Median over repetitions, each of the slowest rank of the group, for which the others wait.

    It is above the slowest rank's median where ranks are slow by turns.
    """
    together = torch.tensor(seconds, dtype=torch.float64)
    if group.size() > 1:
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return median(together.tolist())


def slowest(seconds: float) -> float:
    """Maximum over all ranks."""
    return slowest_of([seconds])[0]


SMALLEST = 16 << 10
LEAST_LARGEST = 1 << 20
"""Minimum range of sizes in bytes from which bandwidth and start-up can be separated."""
NUM_SIZES = 6
TRIES = 3
"""Attempts to measure a link before times that do not grow with bytes are an error."""
_GROWTH = 4
"""Factor from one attempt to the next for repetitions and the largest size."""
_MOST_LARGEST = 64 << 20
"""Maximum bytes of the largest size over the attempts, far above the noise of other programs."""
_BUDGET = 2.0
"""Maximum seconds for the repetitions of one collective of one size; a slow link gets fewer."""
_TRAIN_BYTES, _TRAIN_SECONDS = 1 << 20, 0.1
"""Bytes and seconds of collectives run before timing.

Many links pass a burst after a pause at once, which does not happen in a training step; the warm-up exhausts it.
"""


def sizes(config: ProfileConfig, attempt: int = 0) -> list[int]:
    """Bytes from the smallest to the largest activation of the profile, in geometric steps.

    attempt: number of earlier attempts; the largest size grows with it.
    """
    activation = config.batch * config.sequence * config.hidden * DTYPES[config.dtype].itemsize
    largest = max(activation, LEAST_LARGEST)
    largest = max(largest, min(largest * _GROWTH**attempt, _MOST_LARGEST))
    factor = (largest / SMALLEST) ** (1 / (NUM_SIZES - 1))
    return [round(SMALLEST * factor**step) for step in range(NUM_SIZES)]


def collectives_of(probe: Probe) -> tuple[str, ...]:
    """Collectives to measure for a probe's groups. Messages need pairs of ranks and a real link."""
    sums = ("all_reduce", "reduce_scatter", "all_gather")
    return (*sums, "send") if probe.ranks == 2 and dist.get_backend() != "sim" else sums


def fitted_link(measure: Callable[[int], list[Sample]], option: str) -> LinkModel:
    """Fit a link model without contention. Collective: every rank must call this.

    measure: takes the samples, given the number of earlier attempts. Samples on a busy machine may be noise without
    a bandwidth and are then taken again. Raises UsageError after TRIES attempts; option: what makes the sizes
    larger, for the message.
    """
    failed = ""
    for attempt in range(TRIES):
        link, failed = _fit(measure(attempt))
        if link is not None:
            return link
    raise UsageError(f"links, measured {TRIES} times: {failed}, with a larger {option}")


def _fit(samples: list[Sample]) -> tuple[LinkModel | None, str]:
    """A link model on all ranks or, if the fit failed on one, None and the reason."""
    try:
        link, failed = fit_link(samples, Contention()), ""
    except ValueError as error:
        link, failed = None, str(error)
    # Same samples, but arithmetic may differ between ranks.
    failed = next((each for each in all_gather_objects(failed, dist.group.WORLD) if each), "")
    return (None if failed else link), failed


class LinkBench:
    """Times collectives on one rank."""

    def __init__(self, config: ProfileConfig) -> None:
        self.config = config
        self._clock = Clock(torch.device(config.device))

    def sample(self, probe: Probe, collective: str, num_bytes: int, attempt: int = 0) -> Sample:
        """Time one collective of one size. Collective: every rank must call this, also ranks without a group.

        attempt: number of failed attempts before. Later attempts repeat more often and take the minimum instead of
        the median, because other programs only add time.
        """
        dtype = DTYPES[self.config.dtype]
        elements = -(-num_bytes // dtype.itemsize // probe.ranks) * probe.ranks
        run = self._prepared(probe, collective, elements)
        self._train(run, 1)  # the first one connects
        one = self._train(run, 1)
        count = max(1, min(-(-_TRAIN_BYTES // num_bytes), int(_TRAIN_SECONDS / one)))
        first = self._train(run, count)
        repetitions = max(1, min(self.config.iterations * _GROWTH**attempt, int(_BUDGET / first)))
        times = [self._train(run, count) / count for _ in range(repetitions)]
        return Sample(collective, probe.ranks, elements * dtype.itemsize, min(times) if attempt else median(times))

    def _train(self, run: Callable[[], Any], count: int) -> float:
        """Seconds of `count` calls in sequence."""
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
        if collective == "broadcast":
            return lambda: dist.broadcast(whole, group=group, group_src=0)
        scheduler = scheduler_of(group)
        tensors = {"all_reduce": (whole,), "reduce_scatter": (part, whole), "all_gather": (whole, part)}[collective]
        return lambda: scheduler.wait(getattr(scheduler, collective)(*tensors, "profile"))


def _send(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Send from the first rank of a pair to the second."""
    first, second = dist.get_process_group_ranks(group)
    if group_rank(group) == 0:
        dist.send(tensor, second, group=group)
    else:
        dist.recv(tensor, first, group=group)
