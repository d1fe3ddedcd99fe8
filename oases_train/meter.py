"""Step timing of one rank: seconds, memory, exposed communication and pipeline bubble.

On each rank a step is busy + exposed + bubble. Exposed: compute waits for a collective. Bubble: a pipeline stage is
idle, before a message or after its last pass; as in the simulator. Both are differences of counters that exist
anyway, so timing costs nothing but, when a report is requested, one small all-gather of host values. No GPU tensor is
read, so nothing is synchronized beyond the loss.
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

from oases.core.blocks.sharding import Cut
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_size, scheduler_of
from oases.distributed.clock import Clock
from oases.distributed.collectives import all_gather_cut
from oases.distributed.messages import StageMessages

AT_THE_END = frozenset({"loss", "tied embeddings"})
"""Labels of collectives in which a finished stage waits for the others; counted as bubble."""
REMEMBERED = 1024
"""Number of recent steps for medians."""


Marks = list[tuple[Any, Any]]
"""Start and end marks of a clock."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of one rank's step by part; the rest is compute. memory_bytes: peak so far."""

    seconds: float
    exposed: float
    bubble: float
    optimizer: float
    memory_bytes: float

    @property
    def compute(self) -> float:
        """Seconds of compute: neither exposed, nor bubble, nor optimizer."""
        return self.seconds - self.exposed - self.bubble - self.optimizer


class Meter:
    """Timer of the steps of one rank, `with meter.step():` around each.

    process_group: all ranks of the run. groups: process groups whose collectives compute waits for, duplicates
    allowed. messages: of a pipeline stage; None for a single stage. device: of the model.
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
        self._updates: Marks | None = None  # of the current step
        self._pending: Marks = []  # of the last one in the history
        self._gloo_group: ProcessGroup | None = None
        self._history: deque[StepParts] = deque(maxlen=REMEMBERED)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step and append it to `history`. A step that raises is not counted."""
        exposed, bubble = self._waited()
        updates: Marks = []
        self._updates = updates
        start = time.perf_counter()
        try:
            yield
        finally:
            self._updates = None
        seconds = time.perf_counter() - start
        exposed_after, bubble_after = self._waited()
        self._finish_last()
        self._pending = updates
        held = float(peak_bytes(self.device))
        self._history.append(StepParts(seconds, exposed_after - exposed, bubble_after - bubble, 0.0, held))

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """Time the optimizer update within a step."""
        start = self._clock.mark()
        yield
        if self._updates is not None:
            self._updates.append((start, self._clock.mark()))

    @property
    def history(self) -> Sequence[StepParts]:
        """This rank's recent steps. On a GPU, waits for the last optimizer update."""
        self._finish_last()
        return self._history

    @property
    def last(self) -> StepParts:
        """Last step, without waiting: the optimizer's seconds are 0 while its update is still running."""
        return self._history[-1]

    def reset(self) -> None:
        """Clear the history."""
        self._pending = []
        self._history.clear()

    def all_ranks(self, parts: StepParts) -> list[StepParts]:
        """Gather `parts` of all ranks, in rank order. Collective: one small all-gather of host values."""
        size = group_size(self.process_group)
        if size == 1:
            return [parts]
        group, device = self._host_group()
        mine = torch.tensor(astuple(parts), dtype=torch.float64, device=device)
        whole = all_gather_cut(mine, Cut(0, (size * mine.numel(),)), group, "what a step took")
        return [StepParts(*row) for row in whole.view(size, -1).tolist()]

    def medians(self) -> StepParts:
        """Medians over this rank's steps without the first (warm-up), and peak memory. Zeros before any step."""
        steps = list(self.history)
        rows = steps[1:] or steps or [StepParts(0, 0, 0, 0, 0)]
        found = {item.name: statistics.median(getattr(row, item.name) for row in rows) for item in fields(StepParts)}
        return StepParts(**found | {"memory_bytes": max(row.memory_bytes for row in rows)})

    def _finish_last(self) -> None:
        """Set the optimizer seconds of the last step: on a GPU the update may end after the step returns."""
        if self._pending:
            seconds = sum(self._clock.seconds(*marks) for marks in self._pending)
            self._history[-1] = replace(self._history[-1], optimizer=seconds)
        self._pending = []

    def _host_group(self) -> tuple[ProcessGroup, torch.device]:
        """Group and device for gathering host values."""
        assert self.process_group is not None
        backends = dist.get_backend_config(self.process_group)
        if self.device.type == "cpu" or "cpu:gloo" in backends or "cpu:staged" in backends:
            return self.process_group, torch.device("cpu")
        if "nccl" not in backends:
            return self.process_group, self.device
        if self._gloo_group is None:
            # Over NCCL the all-gather would queue behind the optimizer update, and reading it would wait for that.
            ranks = dist.get_process_group_ranks(self.process_group)
            alone = len(ranks) < dist.get_world_size()
            self._gloo_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=alone)
        return self._gloo_group, torch.device("cpu")

    def _waited(self) -> tuple[float, float]:
        """Seconds so far of waiting for (collectives, other pipeline stages)."""
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
    """Peak memory so far: allocated by torch on the GPU, or the resident set of this process, bytes."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
