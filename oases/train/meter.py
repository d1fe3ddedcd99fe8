"""Measures a rank's steps: seconds, memory, and for how much of them compute stood still.

On each rank a step is busy + exposed + bubble. Exposed: compute waited for a collective. Bubble: a pipeline stage had
nothing to do, before a message or after its last pass; as the simulator counts them. Both are differences of sums
that are kept anyway, so measuring adds nothing to a step but, where somebody wants to know, one small all-gather of
what the ranks saw. That reads no tensor that a GPU works on: nothing is synchronised that the loss has not been.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from oases.execution.clock import Clock
from oases.execution.group import ProcessGroup, group_name, group_of, group_size, scheduler_of
from oases.parallel.collectives import all_gather_cut
from oases.parallel.messages import StageMessages
from oases.parallel.sharding import Cut

AT_THE_END = frozenset({"loss", "tied table"})
"""Collectives for which a stage that is done waits for the others."""
REMEMBERED = 1024
"""Steps of which medians are taken."""


Marks = list[tuple[Any, Any]]
"""Pairs of a clock's marks, around what is measured."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of one rank's step, and what of them was what; the rest is compute. Bytes at its peak so far."""

    seconds: float
    exposed: float
    bubble: float
    optimizer: float
    memory_bytes: float

    @property
    def compute(self) -> float:
        """What neither stood still nor was the optimizer."""
        return self.seconds - self.exposed - self.bubble - self.optimizer


class Meter:
    """Measures the steps of one rank, `with meter.step():` around each, and tells all ranks of them.

    process_group: all ranks of the run. groups: those whose collectives compute waits for; of one that is named
    twice, once counts. messages: of a pipeline's stage, None where there is one stage. device: of the model.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        groups: Sequence[ProcessGroup | None],
        messages: StageMessages | None,
        device: torch.device,
    ) -> None:
        self.process_group, self.messages, self.device = process_group, messages, device
        self._names = tuple(dict.fromkeys(group_name(group) for group in groups if group_size(group) > 1))
        self._clock = Clock(device)
        self._updates: Marks | None = None  # of the step under way
        self._pending: Marks = []  # of the last one in the history
        self._telling: ProcessGroup | None = None
        self._history: deque[StepParts] = deque(maxlen=REMEMBERED)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step; what it took is then the last of `history`. One that raises is not counted."""
        exposed, bubble = self._stood_still()
        updates: Marks = []
        self._updates = updates
        start = time.perf_counter()
        try:
            yield
        finally:
            self._updates = None
        seconds = time.perf_counter() - start
        exposed_after, bubble_after = self._stood_still()
        self._settle()
        self._pending = updates
        held = float(peak_bytes(self.device))
        self._history.append(StepParts(seconds, exposed_after - exposed, bubble_after - bubble, 0.0, held))

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """Around the optimizer's update; counts in a step that is measured."""
        start = self._clock.mark()
        yield
        if self._updates is not None:
            self._updates.append((start, self._clock.mark()))

    @property
    def history(self) -> Sequence[StepParts]:
        """This rank's last steps. On a GPU, asking waits for the last one's update."""
        self._settle()
        return self._history

    @property
    def last(self) -> StepParts:
        """The last step as far as it is known without waiting: its update may still go on, and is not told then."""
        return self._history[-1]

    def reset(self) -> None:
        """Begin a new history."""
        self._pending = []
        self._history.clear()

    def all_ranks(self, parts: StepParts) -> list[StepParts]:
        """Every rank's, in rank order; all ranks call it. One small all-gather, of numbers that the host has."""
        size = group_size(self.process_group)
        if size == 1:
            return [parts]
        group, device = self._told_over()
        mine = torch.tensor(astuple(parts), dtype=torch.float64, device=device)
        whole = all_gather_cut(mine, Cut(0, (size * mine.numel(),)), group, "what a step took")
        return [StepParts(*row) for row in whole.view(size, -1).tolist()]

    def medians(self) -> StepParts:
        """Of this rank's steps, but for the first, which warms up; the most memory. Zeros before any step."""
        steps = list(self.history)
        rows = steps[1:] or steps or [StepParts(0, 0, 0, 0, 0)]
        found = {item.name: statistics.median(getattr(row, item.name) for row in rows) for item in fields(StepParts)}
        return StepParts(**found | {"memory_bytes": max(row.memory_bytes for row in rows)})

    def _settle(self) -> None:
        """Give the last step its update's seconds. A GPU may not have come to its end when the step was over."""
        if self._pending:
            seconds = sum(self._clock.seconds(*marks) for marks in self._pending)
            self._history[-1] = replace(self._history[-1], optimizer=seconds)
        self._pending = []

    def _told_over(self) -> tuple[ProcessGroup, torch.device]:
        """The group that what ranks saw goes over, and where its tensors are."""
        assert self.process_group is not None
        if self.device.type == "cpu" or dist.get_backend(self.process_group) != "nccl":
            return self.process_group, self.device
        if self._telling is None:
            # Over NCCL it would queue behind the optimizer, and reading it would wait for that.
            ranks = dist.get_process_group_ranks(self.process_group)
            alone = len(ranks) < dist.get_world_size()
            self._telling = dist.new_group(ranks, backend="gloo", use_local_synchronization=alone)
        return self._telling, torch.device("cpu")

    def _stood_still(self) -> tuple[float, float]:
        """Seconds so far of waiting for (collectives, a pipeline's other stages)."""
        exposed, bubble = 0.0, 0.0 if self.messages is None else self.messages.waited_seconds
        for name in self._names:
            group = group_of(name)
            assert group is not None
            for label, totals in scheduler_of(group).totals().items():
                if self.messages is not None and label in AT_THE_END:
                    bubble += totals.blocked_seconds
                else:
                    exposed += totals.blocked_seconds
        return exposed, bubble


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: what torch allocated on the GPU, or the resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
