"""Autotuning by measurement: candidates (a stack's schedules, a layer's chunk counts), "off" among them, take turns.

The ranks agree on the slowest rank's times. The choice is cached in a small file and reused by later runs of the same
shape on the same machine. A stack measures its first training steps: all schedules compute the same gradients.
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

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_rank, group_size
from oases.files import read_json
from oases.schedule import LayerOf, Recompute, Schedule, along_sequence, generate

ROUNDS = 3
"""Measured steps per candidate of a stack, after a warm-up step."""
MARGIN = 0.98
"""Maximum time of a chosen schedule as a fraction of that of "off"."""
_SUB_BATCHES = (2, 4, 8)

Candidate = TypeVar("Candidate")


def cache_path() -> Path:
    """File of cached choices: $OASES_CACHE, or oases/schedules.json in the user's cache folder."""
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
    """Candidate schedules of "auto", "off" first: nothing overlapped, but no all-reduces in the recomputation.

    joint: blocks that need all tokens at once, where others do not: a batch of one is then cut along the sequence.
    layer_of: layer of each block, as for `generate`.
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
    """Schedules by their label."""
    return {label(schedule): schedule for schedule in schedules}


def label(schedule: Schedule) -> str:
    """Label of a schedule in the cache."""
    return f"{schedule.name} {schedule.num_sub_batches}"


@dataclass
class Autotune(Generic[Candidate]):
    """Measurements of one configuration, `key`. `current` is the candidate to run next.

    candidates: by label, the same on every rank; with has_off the first is "off", which the others must beat by
    MARGIN. rounds: measured turns per candidate, after a warm-up turn. keep: whether to read and write the cache.
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
        """The chosen candidate; None while measuring."""
        return None if self.chosen is None else self.candidates[self.chosen]

    @property
    def current(self) -> Candidate:
        """The choice, or the candidate whose turn it is."""
        return self.candidates[self.chosen or list(self.candidates)[self._steps % len(self.candidates)]]

    @property
    def num_steps(self) -> int:
        """Steps until a choice is made."""
        return len(self.candidates) * (self.rounds + 1)

    def note(self, seconds: float) -> None:
        """Record the seconds of one forward and backward pass of `current`; choose after the last turn."""
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
        dist.all_gather_object(everyone, mine, group=self.group)  # as objects: NCCL does not send CPU tensors
        slowest = {label: max(medians[label] for medians in everyone) for label in mine}
        off, best = next(iter(slowest)), min(slowest, key=slowest.__getitem__)
        if self.has_off and slowest[best] > MARGIN * slowest[off]:
            best = off
        self.chosen = best
        if self.keep and group_rank(self.group) == 0:
            self._write(best)

    def _agreed(self, label: str | None) -> str | None:
        """Rank 0's cached label on all ranks: caches of several machines may differ."""
        found: list[Any] = [label]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def _read(self) -> str | None:
        try:
            label = _cached()[self.key]
        except (UsageError, KeyError):
            return None  # no valid cached choice: measure
        return next((known for known in self.candidates if known == label), None)

    def _write(self, best: str) -> None:
        path = cache_path()
        try:
            known = _cached()
        except UsageError:
            known = {}
        known[self.key] = best
        aside = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(known, indent=1))
            aside.replace(path)
        except OSError as error:
            print(f"oases: the choice {best!r} could not be saved to {path}: {error.strerror}")


def _cached() -> dict[str, Any]:
    """Cached labels by key. UsageError for a file without any."""
    found = read_json(cache_path(), "cache of choices", "delete it")
    if not isinstance(found, dict):
        raise UsageError(f"cache of choices {str(cache_path())!r} is not a JSON object; delete it")
    return found


Tuning = Autotune[Schedule]


def cache_key(description: str, shape: torch.Size, dtype: torch.dtype, group: ProcessGroup | None) -> str:
    """Key of a configuration: machine, device, link, ranks, blocks and input. A change in any is measured again."""
    link = os.environ.get("OASES_TESTBED_LINK", "")
    backend = dist.get_backend(group) if group is not None else ""
    text = repr((platform.node(), link, backend, group_size(group), description, tuple(shape), str(dtype)))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
