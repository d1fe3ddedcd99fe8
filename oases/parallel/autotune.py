"""Chooses a schedule by measuring: the candidates, "off" among them, take turns on the first steps of a run.

Every candidate computes the same gradients, so the steps used for measuring train like any other. The ranks agree on
the slowest rank's times, and the choice is kept in a small file, so that the next run of the same shape on the same
machine begins with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oases.parallel.group import ProcessGroup, group_rank, group_size
from oases.schedule import Recompute, Schedule, generate

ROUNDS = 3
"""Measured steps per candidate, after one that is not measured."""
MARGIN = 0.98
"""An overlapping schedule must take less than this share of the time of "off" to be chosen."""
_SUB_BATCHES = (2, 4, 8)


def cache_path() -> Path:
    """The file that choices are kept in: $OASES_CACHE, or oases/schedules.json in the user's cache folder."""
    if "OASES_CACHE" in os.environ:
        return Path(os.environ["OASES_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "oases" / "schedules.json"


def candidates(
    num_blocks: int, batch: int, schedule: str, sub_batches: int | str, recompute: Recompute
) -> list[Schedule]:
    """What "auto" chooses from, "off" first: without all-reduces in the recomputation, but nothing overlapped."""
    names = ["cross_pass", "oases"] if schedule == "auto" and recompute == "none" else ["oases"]
    if schedule != "auto":
        names = [schedule]
    counts = [s for s in _SUB_BATCHES if s <= batch] if sub_batches == "auto" else [int(sub_batches)]
    found = [generate("fine_grained", num_blocks, 1, recompute)] if schedule == "auto" else []
    found += [generate(name, num_blocks, count, recompute) for count in counts for name in names]
    return found or [generate(schedule, num_blocks, 1, recompute)]


@dataclass
class Autotune:
    """The measuring of one stack and input shape. `current` is the schedule to run next.

    keep: whether a choice of an earlier run is taken over and this one's is kept.
    """

    schedules: list[Schedule]
    group: ProcessGroup | None
    key: str
    keep: bool = True
    times: list[list[float]] = field(default_factory=list)
    choice: Schedule | None = None
    _steps: int = 0

    def __post_init__(self) -> None:
        self.times = [[] for _ in self.schedules]
        if len(self.schedules) == 1 or group_size(self.group) == 1:
            self.choice = self.schedules[0]
        elif self.keep and (known := self._agreed(self._read())) is not None:
            self.choice = self.schedules[known]

    @property
    def current(self) -> Schedule:
        """The choice, or the candidate whose turn it is."""
        return self.choice or self.schedules[self._steps % len(self.schedules)]

    @property
    def num_steps(self) -> int:
        """Steps that a choice takes where none is known."""
        return len(self.schedules) * (ROUNDS + 1)

    def note(self, seconds: float) -> None:
        """Take the time of one forward and backward pass of `current`; choose once all had their turns."""
        if self.choice is not None:
            return
        turn, index = divmod(self._steps, len(self.schedules))
        if turn > 0:
            self.times[index].append(seconds)
        self._steps += 1
        if self._steps == self.num_steps:
            self._choose()

    def _choose(self) -> None:
        medians = torch.tensor([statistics.median(times) for times in self.times], dtype=torch.float64)
        dist.all_reduce(medians, dist.ReduceOp.MAX, group=self.group)
        best = int(medians.argmin())
        off = self.schedules[0]
        if not off.overlaps and float(medians[best]) > MARGIN * float(medians[0]):
            best = 0
        self.choice = self.schedules[best]
        if self.keep and group_rank(self.group) == 0:
            self._write(best)

    def _agreed(self, index: int | None) -> int | None:
        """Rank 0's reading, everywhere: caches of several machines may differ."""
        found: list[Any] = [index]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def _read(self) -> int | None:
        try:
            name = json.loads(cache_path().read_text())[self.key]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # no choice was kept, or by something else: measure
        labels = [label(schedule) for schedule in self.schedules]
        return labels.index(name) if name in labels else None

    def _write(self, best: int) -> None:
        path = cache_path()
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        known[self.key] = label(self.schedules[best])
        aside = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(known, indent=1))
            aside.replace(path)
        except OSError as error:
            print(f"oases: the choice of schedule could not be kept in {path}: {error.strerror}")


def cache_key(description: str, shape: torch.Size, dtype: torch.dtype, group: ProcessGroup | None) -> str:
    """Names a situation: machine, device, link, ranks, blocks and input. A change in any is measured anew."""
    link = os.environ.get("OASES_TESTBED_LINK", "")
    backend = dist.get_backend(group) if group is not None else ""
    text = repr((platform.node(), link, backend, group_size(group), description, tuple(shape), str(dtype)))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def label(schedule: Schedule) -> str:
    """A candidate by name and number of sub-batches, such as "oases 4"."""
    return f"{schedule.name} {schedule.num_sub_batches}"
