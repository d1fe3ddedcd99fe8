"""Chooses by measuring: candidates (a stack's schedules, a layer's chunk counts), "off" among them, take turns.

The ranks agree on the slowest rank's times, and the choice is kept in a small file, so that the next run of the same
shape on the same machine begins with it. A stack measures its first steps: every schedule computes the same
gradients, so these steps train like any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from oases.execution.group import ProcessGroup, group_rank, group_size
from oases.schedule import LayerOf, Recompute, Schedule, along_sequence, generate

ROUNDS = 3
"""Measured steps per candidate of a stack, after one that is not measured."""
MARGIN = 0.98
"""An overlapping schedule must take less than this share of the time of "off" to be chosen."""
_SUB_BATCHES = (2, 4, 8)

Candidate = TypeVar("Candidate")


def cache_path() -> Path:
    """The file that choices are kept in: $OASES_CACHE, or oases/schedules.json in the user's cache folder."""
    if "OASES_CACHE" in os.environ:
        return Path(os.environ["OASES_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "oases" / "schedules.json"


def candidates(
    num_blocks: int,
    batch: int,
    schedule: str,
    sub_batches: int | str,
    recompute: Recompute,
    joint: frozenset[int] | None = None,
    layer_of: LayerOf = None,
) -> list[Schedule]:
    """What "auto" chooses from, "off" first: without all-reduces in the recomputation, but nothing overlapped.

    joint: the blocks that need every token at once, where others do not: a batch of one is then cut by its tokens.
    layer_of: each block's layer, as `generate` takes it.
    """
    names = ["cross_pass", "oases"] if schedule == "auto" and recompute == "none" else ["oases"]
    if schedule != "auto":
        names = [schedule]
    counts = [s for s in _SUB_BATCHES if s <= batch] if sub_batches == "auto" else [int(sub_batches)]
    found = [generate("fine_grained", num_blocks, 1, recompute, layer_of)] if schedule == "auto" else []
    if batch == 1 and joint is not None and "oases" in names:
        parts = _SUB_BATCHES[:2] if sub_batches == "auto" else counts
        return found + [along_sequence(num_blocks, count, joint, recompute, layer_of) for count in parts if count > 1]
    found += [generate(name, num_blocks, count, recompute, layer_of) for count in counts for name in names]
    return found or [generate(schedule, num_blocks, 1, recompute, layer_of)]


def labelled(schedules: list[Schedule]) -> dict[str, Schedule]:
    """Schedules by the label that a choice is kept under."""
    return {label(schedule): schedule for schedule in schedules}


def label(schedule: Schedule) -> str:
    """What a choice of this schedule is kept under."""
    return f"{schedule.name} {schedule.num_sub_batches}"


@dataclass
class Autotune(Generic[Candidate]):
    """The measuring of one situation, `key`. `current` is the candidate to run next.

    candidates: by label, the same on every rank; with has_off the first is "off", which the others must beat by
    MARGIN. rounds: measured turns per candidate, after one that is not measured. keep: whether a choice of an
    earlier run is taken over and this one's is kept.
    """

    candidates: dict[str, Candidate]
    group: ProcessGroup | None
    key: str
    has_off: bool
    rounds: int = ROUNDS
    keep: bool = True
    times: dict[str, list[float]] = field(init=False)
    chosen: str | None = None
    """The label of the choice, once made."""
    _steps: int = 0

    def __post_init__(self) -> None:
        self.times = {label: [] for label in self.candidates}
        if len(self.candidates) == 1 or group_size(self.group) == 1:
            self.chosen = next(iter(self.candidates))
        elif self.keep:
            self.chosen = self._agreed(self._read())

    @property
    def choice(self) -> Candidate | None:
        """The candidate chosen; None while it is being measured."""
        return None if self.chosen is None else self.candidates[self.chosen]

    @property
    def current(self) -> Candidate:
        """The choice, or the candidate whose turn it is."""
        return self.candidates[self.chosen or list(self.candidates)[self._steps % len(self.candidates)]]

    @property
    def num_steps(self) -> int:
        """Steps that a choice takes where none is known."""
        return len(self.candidates) * (self.rounds + 1)

    def note(self, seconds: float) -> None:
        """Take the time of one forward and backward pass of `current`; choose once all had their turns."""
        if self.chosen is not None:
            return
        turn, index = divmod(self._steps, len(self.candidates))
        if turn > 0:
            self.times[list(self.candidates)[index]].append(seconds)
        self._steps += 1
        if self._steps == self.num_steps:
            self._choose()

    def _choose(self) -> None:
        mine = {label: statistics.median(times) for label, times in self.times.items()}
        everyone: list[Any] = [mine] * group_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)  # as objects: NCCL takes no tensors of the CPU
        slowest = {label: max(medians[label] for medians in everyone) for label in mine}
        off, best = next(iter(slowest)), min(slowest, key=slowest.__getitem__)
        if self.has_off and slowest[best] > MARGIN * slowest[off]:
            best = off
        self.chosen = best
        if self.keep and group_rank(self.group) == 0:
            self._write(best)

    def _agreed(self, label: str | None) -> str | None:
        """Rank 0's reading, everywhere: caches of several machines may differ."""
        found: list[Any] = [label]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def _read(self) -> str | None:
        try:
            label = json.loads(cache_path().read_text())[self.key]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # no choice was kept, or by something else: measure
        return next((known for known in self.candidates if known == label), None)

    def _write(self, best: str) -> None:
        path = cache_path()
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        known[self.key] = best
        aside = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(known, indent=1))
            aside.replace(path)
        except OSError as error:
            print(f"oases: the choice {best!r} could not be kept in {path}: {error.strerror}")


Tuning = Autotune[Schedule]


def cache_key(description: str, shape: torch.Size, dtype: torch.dtype, group: ProcessGroup | None) -> str:
    """Names a situation: machine, device, link, ranks, blocks and input. A change in any is measured anew."""
    link = os.environ.get("OASES_TESTBED_LINK", "")
    backend = dist.get_backend(group) if group is not None else ""
    text = repr((platform.node(), link, backend, group_size(group), description, tuple(shape), str(dtype)))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
