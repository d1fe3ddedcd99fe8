"""Autotuning by measurement: candidates (a stack's schedules, a layer's chunk counts), "off" among them, take turns.

After each round the ranks agree on the slowest rank's times, and candidates that are clearly slower drop out, by how
much turns of one candidate differ. In doubt nothing overlaps. More sub-batches are tried only where fewer are not
clearly slower. A stack measures its first training steps: all schedules compute the same gradients, summed in another
order. So that later runs on the same machine have the same losses to the bit, a small file keeps the choice together
with the turns that led to it, and a later run repeats both without measuring. Under
torch.use_deterministic_algorithms(True) nothing is measured and the choice is fixed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import statistics
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
from oases.errors import UsageError
from oases.files import read_json, write_text

ROUNDS = 16
"""Most measured turns of a candidate, after a warm-up turn."""
SLACK, LEAST_SLACK = 0.25, 0.02
"""Part by which a candidate may be slower than the fastest after n rounds: SLACK / n, at least the second."""
SURE = 2.0
"""Standard deviations of a difference of medians by which a candidate is clearly slower."""
PROMISING = 1.1
"""Most time over the fastest's of a candidate with fewer sub-batches for which more are tried."""
BUDGET = 3.0
"""Steps' worth of time that a stack may lose to slower candidates, over all shapes of its input, before it tries no
further ones; those under way stay."""
MARGIN = 0.98
"""Maximum time of a chosen schedule as a fraction of that of "off"."""
FIXED = "oases 2"
"""Label of the choice under torch.use_deterministic_algorithms(True), where there is such a candidate."""
_DIGITS = string.digits + string.ascii_lowercase
_MOST_KEPT = 1000
"""Choices in the cache; the oldest leave."""

Candidate = TypeVar("Candidate")


def cache_path() -> Path:
    """File of cached choices: $OASES_CACHE, or oases/schedules.json in the user's cache folder."""
    if "OASES_CACHE" in os.environ:
        return Path(os.environ["OASES_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "oases" / "schedules.json"


@dataclass
class Budget:
    """Steps that may still be lost to candidates other than the fastest, over all that share it."""

    steps: float = BUDGET


Begun = tuple[str, str, str | None]
"""State of a measurement when it begins: candidates whose turns are over, those of turns to repeat, a character for
each turn (`_DIGITS`); label that follows the last turn, None to measure."""


Seconds = float | Callable[[], float]
"""Seconds of a turn, or a function that waits for its end and returns them."""


class Turn(NamedTuple):
    """Call of a candidate. note: takes the seconds of its forward and backward pass, as of `Autotune.note`."""

    label: str
    note: Callable[[Seconds], None]


@dataclass
class Autotune(Generic[Candidate]):
    """Measurements of one configuration, `key`.

    candidates: by label, the same on every rank; with has_off the first is "off", which the others must beat by
    MARGIN. exact: how many of them, the first ones, compute the same; the others must beat these by MARGIN, too; 0
    for all. rounds: measured turns at most, after a warm-up turn. keep: whether to read and write the cache. fixed:
    label of the choice where nothing is to be measured. resumed: turns of the run that this one resumes; both are
    rank 0's. waves: labels that are tried together, each wave only if one of the wave before, other than "off", is
    about as fast as the fastest after a round; () for one wave.
    """

    candidates: dict[str, Candidate]
    group: ProcessGroup | None
    key: str
    has_off: bool
    rounds: int = ROUNDS
    keep: bool = True
    fixed: str | None = None
    resumed: str = ""
    waves: Sequence[Sequence[str]] = ()
    exact: int = 0
    budget: Budget = field(default_factory=Budget)
    times: dict[str, list[float]] = field(init=False)
    """Seconds by label, the warm-up turn's first."""
    turns: str = field(init=False, default="")
    """Candidates of the calls so far, while measuring or repeating: a character each."""

    def __post_init__(self) -> None:
        self.times = {label: [] for label in self.candidates}
        self._waves = [list(wave) for wave in self.waves] or [list(self.candidates)]
        self._wave = self._waves.pop(0)
        self._left = [*self._wave]
        self._medians: dict[str, float] = {}  # of the slowest rank
        self._ended: list[tuple[str, Callable[[], float]]] = []
        begun: Begun = "", "", next(iter(self.candidates))
        if len(self.candidates) > 1 and group_size(self.group) > 1:
            begun = self._agreed() if self.fixed is not None or self.keep or self.resumed else ("", "", None)
        self.turns, self._repeated, self._chosen = begun

    @property
    def chosen(self) -> str | None:
        """Label of the choice; None while measuring, or repeating the turns of an earlier run."""
        return self._chosen if len(self.turns) >= len(self._repeated) else None

    @property
    def choice(self) -> Candidate | None:
        """The chosen candidate; None as for `chosen`."""
        return None if self.chosen is None else self.candidates[self.chosen]

    @property
    def turn(self) -> str:
        """Label of the next call's candidate."""
        if self.chosen is not None:
            return self.chosen
        if len(self.turns) < len(self._repeated):
            return [*self.candidates][_DIGITS.index(self._repeated[len(self.turns)])]
        return min(self._left, key=lambda label: len(self.times[label]))

    @property
    def current(self) -> Candidate:
        """The choice, or the candidate whose turn it is."""
        return self.candidates[self.turn]

    @property
    def settled(self) -> Candidate:
        """The choice; before it is made that of a run that measures nothing, for calls that are not measured."""
        return self.candidates[self.chosen or fixed_among([*self.candidates][: self.exact or None])]

    def begin_turn(self) -> Turn:
        """Begin a call of the candidate whose turn it is; called alike on all ranks, until `choice` is made."""
        ended, self._ended = self._ended, []
        for label, seconds in ended:
            self.note(label, seconds())
        label = self.turn
        if self.chosen is None:
            self.turns += _DIGITS[[*self.candidates].index(label)]
        return Turn(label, functools.partial(self.note, label))

    def note(self, label: str, seconds: Seconds) -> None:
        """Record the seconds of a forward and backward pass of a candidate; called alike on all ranks.

        After a round candidates drop out, or the choice is made. Repeated turns are not measured. A function is
        called when the next turn begins: in a pipeline other ranks may wait for what this one has not queued yet.
        """
        if self._chosen is not None:
            return
        if not isinstance(seconds, float):
            self._ended.append((label, seconds))
            return
        self.times[label].append(seconds)
        done = min(len(self.times[label]) for label in self._left) - 1
        if label in self._left and len(self.times[label]) == done + 1 and done > 0:
            self._end_round(done)

    def _end_round(self, done: int) -> None:
        mine = {label: statistics.median(self.times[label][1:]) for label in self._left}
        said = mine, math.sqrt(2 / done) * spread([self.times[label][: done + 1] for label in self._left])
        everyone = all_gather_objects(said, self.group)  # as objects: NCCL does not send CPU tensors
        medians = {label: max(each[label] for each, _ in everyone) for label in mine}
        doubt = max(each for _, each in everyone)
        self._medians |= medians
        fastest = min(medians.values())
        lost = sum(max(0.0, each / fastest - 1 - doubt) for each in medians.values())
        self.budget.steps -= lost * (2 if done == 1 else 1)  # the first with the warm-up's
        slack = 1 + max(SLACK / done, LEAST_SLACK, SURE * doubt)
        self._left = [label for label in self._left if medians[label] <= slack * fastest]
        off = next(iter(self.candidates)) if self.has_off else None
        others = [medians[label] for label in self._wave if label in self._left and label != off]
        more = self._waves and min(others, default=math.inf) <= PROMISING * fastest
        if more and self.budget.steps > 0 and (doubt <= PROMISING - 1 or len(self._left) == 1):
            self._wave = self._waves.pop(0)
            self._left += self._wave
        elif len(self._left) == 1 or done == self.rounds or self.budget.steps <= 0:
            self._choose(doubt)

    def _choose(self, doubt: float) -> None:
        """Choose the fastest. doubt: standard deviation of a difference of medians, relative."""
        exact = [label for label in [*self.candidates][: self.exact] if label in self._medians]
        best = min(self._left, key=self._medians.__getitem__)
        if exact and best not in exact:
            other = min(exact, key=self._medians.__getitem__)
            best = best if self._medians[best] <= MARGIN * self._medians[other] else other
        off = next(iter(self.candidates))
        margin = min(MARGIN, 1 - doubt) if off in self._left else MARGIN
        if self.has_off and self._medians[best] > margin * self._medians[off]:
            best = off
        self._chosen = best
        if self.keep and group_rank(self.group) == 0:
            _write(self.key, self.turns, best)

    def _agreed(self) -> Begun:
        """Rank 0's beginning on all ranks: caches of several machines may differ."""
        found = [self._begun()]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def _begun(self) -> Begun:
        if self.fixed in self.candidates:
            return "", "", self.fixed
        repeated, known = _read(self.key) if self.keep else ("", None)
        possible = known in self.candidates and {*repeated} <= {*_DIGITS[: len(self.candidates)]}
        if possible and repeated.startswith(self.resumed):
            return self.resumed, repeated, known
        if self.keep and self.budget.steps <= 0:
            chosen = fixed_among([*self.candidates][: self.exact or None])
            _write(self.key, self.resumed, chosen)
            return self.resumed, self.resumed, chosen
        return self.resumed, self.resumed, None


def spread(turns: Sequence[Sequence[float]]) -> float:
    """Relative standard deviation of a turn: what differs by neither candidate nor round. turns: of each candidate.

    Few turns tell little of it, so it is estimated higher the fewer there are.
    """
    logs = [[math.log(max(seconds, 1e-12)) for seconds in each] for each in turns]
    many, rounds = len(logs), len(logs[0])
    if many < 2 or rounds < 2:
        return 0.0
    whole = statistics.fmean(value for each in logs for value in each)
    of_round = [statistics.fmean(column) - whole for column in zip(*logs, strict=True)]
    squares = sum(
        (value - statistics.fmean(each) - common) ** 2
        for each in logs
        for value, common in zip(each, of_round, strict=True)
    )
    free = (many - 1) * (rounds - 1)
    return math.sqrt(squares / free) * (1 + 4 / free)


def _read(key: str) -> tuple[str, str | None]:
    """The cached turns and choice of a key; none where the cache has no valid ones."""
    try:
        found: Any = _cached().get(key)
    except UsageError:
        return "", None  # measure, and write it anew
    if isinstance(found, str):
        found = {"turns": "", "chosen": found}
    valid = isinstance(found, dict) and all(isinstance(found.get(name), str) for name in ("turns", "chosen"))
    return (found["turns"], found["chosen"]) if valid else ("", None)


def _write(key: str, turns: str, chosen: str) -> None:
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # stages and replicas choose in the same step
            try:
                known = _cached()
            except UsageError:
                known = {}
            known.pop(key, None)
            known[key] = {"turns": turns, "chosen": chosen} if turns else chosen
            kept = dict([*known.items()][-_MOST_KEPT:])
            write_text(path, json.dumps(kept, indent=1), "cache of choices")
    except (OSError, UsageError) as error:
        print(f"oases: the choice {chosen!r} could not be saved to {path}: {error}")


def _cached() -> dict[str, Any]:
    """Cached labels by key. UsageError for a file without any."""
    found = read_json(cache_path(), "cache of choices", "delete it")
    if not isinstance(found, dict):
        raise UsageError(f"cache of choices {str(cache_path())!r} is not a JSON object; delete it")
    return found


def cache_key(description: str, shape: Sequence[int], dtype: torch.dtype, group: ProcessGroup | None) -> str:
    """Key of a configuration, "CONFIGURATION.MACHINE": of blocks, input and ranks, and of machine, torch and link.

    A change in any is measured again. Groups of equal size have keys of their own, as they choose on their own.
    """
    link = os.environ.get("OASES_TESTBED_LINK", "")
    backend = dist.get_backend(group) if group is not None else ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    machine = (platform.node(), platform.machine(), os.cpu_count(), device, torch.__version__, link, backend)
    ranks = dist.get_process_group_ranks(group) if group is not None else [0]
    configuration = (ranks, description, tuple(shape), str(dtype))
    return ".".join(
        hashlib.blake2b(repr(each).encode(), digest_size=12).hexdigest() for each in (configuration, machine)
    )


def fixed_among(labels: Iterable[str]) -> str:
    """Label of the choice where nothing is measured: FIXED, or else the last."""
    found = [*labels]
    return FIXED if FIXED in found else found[-1]
