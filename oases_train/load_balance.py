"""Expert load balance of training steps, with and without replicas, and the trace of expert loads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank
from oases.errors import UsageError, make_folder
from oases.moe.layer import OverlappedMoE
from oases.moe.placement import make_placement, owner_only
from oases_train.traces import Recorder, replay


@dataclass(frozen=True)
class StepLoadBalance:
    """Expert load balance of one step.

    balance_before, balance_after: standard deviation of the load per rank without and with expert replicas, in
    (token, expert) pairs, mean over layers and micro-batches. copies: expert replicas in all layers, mean over
    micro-batches. dropped: (token, expert) pairs over capacity. saved_seconds: time saved by replicas in all layers
    and micro-batches, by the placement cost model; 0 where nothing was modelled.
    """

    balance_before: float
    balance_after: float
    copies: float
    dropped: int
    saved_seconds: float

    def text(self) -> str:
        """Format as e.g. "balance 41.2 > 8.5, 6 copies"."""
        words = f"balance {self.balance_before:.3g} > {self.balance_after:.3g}, {self.copies:.3g} copies"
        return words + (f", {self.dropped} dropped" if self.dropped else "")


class LoadBalance:
    """Load balance over a run: call `record_layers` after every forward pass and `step` after every step.

    group: all ranks of the run. stages: number of pipeline stages. trace: file for expert loads, truncated to the
    first `steps_done` steps. Every rank has one with the same results; rank 0 writes the trace.
    """

    def __init__(self, group: ProcessGroup | None, stages: int, trace: str | None, steps_done: int) -> None:
        self._group, self._stages = group, stages
        self._trace = Path(trace) if trace is not None and group_rank(group) == 0 else None
        if self._trace is not None:
            _begin(self._trace, steps_done)
        self._noted: dict[int, list[StepLoadBalance]] = {}
        self._counts: dict[int, Any] = {}
        self.last: StepLoadBalance | None = None
        """Balance of the last step."""
        self._steps, self._sums = 0, np.zeros(len(fields(StepLoadBalance)))

    def record_layers(self, layers: Mapping[int, OverlappedMoE]) -> None:
        """Record a micro-batch's forward pass through MoE layers, given by layer number."""
        for number, layer in layers.items():
            done, saved = layer.last, 0.0
            assert done is not None
            self._counts[number] = self._counts.get(number, 0) + done.counts
            placed = done.placement
            if layer.costs is not None and placed.moved:
                plain = make_placement("none", done.counts, layer.costs, owner_only(done.counts))
                now = make_placement(placed.method, done.counts, layer.costs, (placed.routes, placed.copies))
                saved = plain.predicted_seconds - now.predicted_seconds
            copies = sum(map(len, placed.copies))
            found = StepLoadBalance(done.balance_degree_at_home, done.balance_degree, copies, done.dropped, saved)
            self._noted.setdefault(number, []).append(found)

    def discard_step(self) -> None:
        """Forget what was recorded in a step that failed."""
        self._noted, self._counts = {}, {}

    def step(self, number: int) -> None:
        """Finish step `number`, counted from 0, and write its loads to the trace. Collective over all ranks."""
        noted, counts = self._noted, self._counts
        if self._stages > 1:
            for others, loads in all_gather_objects((noted, counts), self._group):
                noted, counts = noted | others, counts | loads
        rows = [_over_layers(rows) for rows in zip(*(noted[layer] for layer in sorted(noted)), strict=True)]
        before, after, copies, dropped, saved = (list(column) for column in zip(*map(astuple, rows), strict=True))
        mean = statistics.mean
        self.last = StepLoadBalance(mean(before), mean(after), mean(copies), sum(dropped), sum(saved))
        self._steps, self._sums = self._steps + 1, self._sums + astuple(self.last)
        if self._trace is not None:
            with Recorder(self._trace, append=True) as recorder:
                for layer in sorted(counts):
                    recorder.write(number, layer, counts[layer])
        self.discard_step()

    def summary(self) -> dict[str, float]:
        """Means over the steps of this process; rb: balance_before / balance_after."""
        if not self._steps:
            return {}
        means = (self._sums / self._steps).tolist()
        found = {item.name: mean for item, mean in zip(fields(StepLoadBalance), means, strict=True)}
        before, after = found["balance_before"], found["balance_after"]
        return found | {"rb": before / after if after else 1.0 if not before else float(np.inf)}


def _over_layers(rows: Sequence[StepLoadBalance]) -> StepLoadBalance:
    """Balance of a micro-batch from those of its layers."""
    before, after, copies, dropped, saved = zip(*map(astuple, rows), strict=True)
    return StepLoadBalance(
        statistics.mean(before), statistics.mean(after), float(sum(copies)), sum(dropped), sum(saved)
    )


def require_new_trace(trace: str, *, new: bool) -> None:
    """Raise UsageError unless loads may be recorded in this file. new: the run does not resume another."""
    path = Path(trace)
    if path.is_dir():
        raise UsageError(f"record_loads {trace!r} is a folder; give the path of a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"record_loads {trace!r} is a pipe or device; give the path of a file")
    make_folder(path.resolve().parent, "record_loads")
    if path.is_file() and path.stat().st_size:
        for _ in replay(path):  # raises for a file that is not a trace
            if new:
                raise UsageError(f"record_loads {trace!r} holds the loads of another run; give a new file")


def _begin(path: Path, steps_done: int) -> None:
    """Truncate the trace to the steps before `steps_done`, at once: a process that is killed here loses none."""
    path = path.resolve()
    aside = path.with_name(f".{path.name}.part")
    with Recorder(aside) as recorder:
        for row in replay(path) if path.is_file() and path.stat().st_size else ():
            if row[0] < steps_done:
                recorder.write(*row)
    aside.replace(path)
