"""Autotuning by measurement: candidates (a stack's schedules, a layer's chunk counts), "off" among them, take turns.

After each round the ranks agree on the slowest rank's times, and candidates that are clearly slower drop out: most of
the turns go to those that are hard to tell apart. More sub-batches are tried only where fewer are not clearly slower.
The choice is cached in a small file and reused by later runs of like shapes on the same machine. A stack measures its
first training steps: all schedules compute the same gradients, in sums of another order. So under
torch.use_deterministic_algorithms(True) nothing is measured, the choice is fixed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_rank, group_size
from oases.execution.wire import WireType, carries_codes, wire_type
from oases.files import read_json, write_text
from oases.plans.plan import AUTO
from oases.plans.shape import LOSSY, QUANTISED, WIRE_BYTES
from oases.schedule import GENERATORS, LayerOf, Recompute, Schedule, along_sequence, generate

ROUNDS = 8
"""Most measured turns of a candidate, after a warm-up turn."""
SLACK = (1.25, 1.1, 1.05)
"""Time over the fastest candidate's beyond which one drops out, after the first, second and later rounds."""
MARGIN = 0.98
"""Maximum time of a chosen schedule as a fraction of that of "off"."""
FIXED = "oases 2"
"""Label of the choice under torch.use_deterministic_algorithms(True), where there is such a candidate."""
_SUB_BATCHES = (2, 4, 8)
_MOST_KEPT = 1000
"""Choices in the cache; the oldest leave."""

Candidate = TypeVar("Candidate")
SubBatchCount = int | Literal["auto"]
Asked = tuple[str, SubBatchCount, Recompute]
"""Schedule, sub_batches and recompute of a stack."""


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


def labelled(schedules: Iterable[Schedule], wires: Sequence[str] = ()) -> dict[str, Choice]:
    """Schedules by their label, first with exact sums, then with each of the wires."""
    schedules = [*schedules]
    found = {label(schedule): Choice(schedule) for schedule in schedules}
    return found | {
        f"{label(schedule)} {wire}": Choice(schedule, wire_type(wire)) for wire in wires for schedule in schedules
    }


def lossy_wires(group: ProcessGroup | None, x: Tensor) -> list[str]:
    """Wires that "auto:lossy" measures for such an activation: those that the group carries, in fewer bytes."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    quantised = group is not None and x.is_cpu and x.dtype in types and carries_codes(group)
    return [name for name in LOSSY if WIRE_BYTES[name] < x.dtype.itemsize and (name not in QUANTISED or quantised)]


def label(schedule: Schedule) -> str:
    """Label of a schedule in the cache."""
    return f"{schedule.name} {schedule.num_sub_batches}"


@dataclass
class Autotune(Generic[Candidate]):
    """Measurements of one configuration, `key`. `current` is the candidate to run next.

    candidates: by label, the same on every rank; with has_off the first is "off", which the others must beat by
    MARGIN. exact: how many of them, the first ones, compute the same; the others must beat these by MARGIN, too; 0
    for all. rounds: measured turns at most, after a warm-up turn. keep: whether to read and write the cache. fixed:
    label of the choice where nothing is to be measured; rank 0's counts. waves: labels that are tried together, each
    wave only if one of the wave before, other than "off", is left after a round; () for one wave.
    """

    candidates: dict[str, Candidate]
    group: ProcessGroup | None
    key: str
    has_off: bool
    rounds: int = ROUNDS
    keep: bool = True
    fixed: str | None = None
    waves: Sequence[Sequence[str]] = ()
    exact: int = 0
    times: dict[str, list[float]] = field(init=False)
    """Seconds by label, the warm-up turn's first."""
    chosen: str | None = None
    """The label of the choice, once made."""

    def __post_init__(self) -> None:
        self.times = {label: [] for label in self.candidates}
        self._waves = [list(wave) for wave in self.waves] or [list(self.candidates)]
        self._wave = self._waves.pop(0)
        self._left = [*self._wave]
        self._medians: dict[str, float] = {}  # of the slowest rank
        if len(self.candidates) == 1 or group_size(self.group) == 1:
            self.chosen = next(iter(self.candidates))
        elif self.fixed is not None or self.keep:
            self.chosen = self._agreed(self.fixed if self.fixed in self.candidates else self._read())

    @property
    def choice(self) -> Candidate | None:
        """The chosen candidate; None while measuring."""
        return None if self.chosen is None else self.candidates[self.chosen]

    @property
    def turn(self) -> str:
        """Label of `current`."""
        return self.chosen or min(self._left, key=lambda label: len(self.times[label]))

    @property
    def current(self) -> Candidate:
        """The choice, or the candidate whose turn it is."""
        return self.candidates[self.turn]

    @property
    def settled(self) -> Candidate:
        """The choice; before it is made that of a run that measures nothing, for calls that are not measured."""
        return self.candidates[self.chosen or fixed_among([*self.candidates][: self.exact or None])]

    @property
    def num_steps(self) -> int:
        """Most steps until a choice is made."""
        return len(self.candidates) * (self.rounds + 1)

    def note(self, label: str, seconds: float) -> None:
        """Record the seconds of a forward and backward pass of a candidate; called alike on all ranks.

        After a round candidates drop out, or the choice is made.
        """
        if self.chosen is not None:
            return
        self.times[label].append(seconds)
        done = min(len(self.times[label]) for label in self._left) - 1
        if label in self._left and len(self.times[label]) == done + 1 and done > 0:
            self._end_round(done)

    def _end_round(self, done: int) -> None:
        mine = {label: statistics.median(self.times[label][1:]) for label in self._left}
        everyone: list[Any] = [mine] * group_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)  # as objects: NCCL does not send CPU tensors
        self._medians |= {label: max(medians[label] for medians in everyone) for label in mine}
        fastest = min(self._medians[label] for label in self._left)
        slack = SLACK[min(done, len(SLACK)) - 1]
        self._left = [label for label in self._left if self._medians[label] <= slack * fastest]
        off = next(iter(self.candidates)) if self.has_off else None
        if self._waves and any(label in self._left for label in self._wave if label != off):
            self._wave = self._waves.pop(0)
            self._left += self._wave
        elif len(self._left) == 1 or done == self.rounds:
            self._choose()

    def _choose(self) -> None:
        exact = [label for label in [*self.candidates][: self.exact] if label in self._medians]
        best = min(self._left, key=self._medians.__getitem__)
        if exact and best not in exact:
            other = min(exact, key=self._medians.__getitem__)
            best = best if self._medians[best] <= MARGIN * self._medians[other] else other
        off = next(iter(self.candidates))
        if self.has_off and self._medians[best] > MARGIN * self._medians[off]:
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
        if not self.keep:
            return None
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
        known.pop(self.key, None)
        known[self.key] = best
        kept = dict([*known.items()][-_MOST_KEPT:])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(kept, indent=1), "cache of choices")
        except (OSError, UsageError) as error:
            print(f"oases: the choice {best!r} could not be saved to {path}: {error}")


def _cached() -> dict[str, Any]:
    """Cached labels by key. UsageError for a file without any."""
    found = read_json(cache_path(), "cache of choices", "delete it")
    if not isinstance(found, dict):
        raise UsageError(f"cache of choices {str(cache_path())!r} is not a JSON object; delete it")
    return found


class Choice(NamedTuple):
    """Candidate of a stack. wire: type of its sums; None for their own."""

    schedule: Schedule
    wire: WireType | None = None


Tuning = Autotune[Choice]


def bucket_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Shapes that share a choice: batch rounded down, other dimensions but the last rounded up to powers of two."""
    batch = 1 << max(shape[0], 1).bit_length() - 1
    return batch, *(1 << (size - 1).bit_length() for size in shape[1:-1]), *shape[1:][-1:]


def cache_key(description: str, shape: Sequence[int], dtype: torch.dtype, group: ProcessGroup | None) -> str:
    """Key of a configuration, "CONFIGURATION.MACHINE": of blocks, input and ranks, and of machine, torch and link.

    A change in any is measured again.
    """
    link = os.environ.get("OASES_TESTBED_LINK", "")
    backend = dist.get_backend(group) if group is not None else ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    machine = (platform.node(), platform.machine(), os.cpu_count(), device, torch.__version__, link, backend)
    configuration = (group_size(group), description, tuple(shape), str(dtype))
    return ".".join(
        hashlib.blake2b(repr(each).encode(), digest_size=12).hexdigest() for each in (configuration, machine)
    )


def fixed_among(labels: Iterable[str]) -> str:
    """Label of the choice where nothing is measured: FIXED, or else the last."""
    found = [*labels]
    return FIXED if FIXED in found else found[-1]


class Tunings(dict[str, Tuning]):
    """Tunings of one stack by key, and what it was asked for.

    asked: schedule, sub_batches and recomputation; either of the first two is "auto", unless `only` is the schedule,
    and wires alone are measured. may_be_off: whether "off" is a candidate where others are. lossy: measure wires
    other than the type of the sums.
    """

    def __init__(
        self, asked: Asked, num_blocks: int, layer_of: LayerOf, *, may_be_off: bool, lossy: bool = False,
        only: Schedule | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.asked, self._num_blocks, self._layer_of, self._may_be_off = asked, num_blocks, layer_of, may_be_off
        self.lossy, self._only = lossy, only
        self.resumed: dict[str, str] = {}
        """Choices of a run that this one resumes (`choices`); they are not measured again."""
        self._by_form: dict[tuple[object, ...], Tuning] = {}

    def candidates(self, batch: int, joint: frozenset[int] | None = None) -> list[Schedule]:
        """Candidate schedules for a batch, see `candidates`."""
        if self._only is not None:
            return [self._only]
        found = candidates(self._num_blocks, batch, *self.asked, joint, self._layer_of)
        overlapping = [schedule for schedule in found if schedule.overlaps]
        return found if self._may_be_off or not overlapping else overlapping

    def of(
        self, x: Tensor, joint: frozenset[int] | None, parameters: Callable[[], Iterable[Tensor]],
        lay_out: Callable[[Schedule], Schedule], group: ProcessGroup | None, agree: Callable[[], None],
    ) -> Tuning:  # fmt: skip
        """Tuning for inputs like `x`. parameters: of the blocks. lay_out: makes a schedule that the stack can run.
        agree: called for new shapes, raises where the ranks' differ; what follows is a collective.

        Nothing is measured where the run that is resumed chose, or torch is to be deterministic.
        """
        form = (x.shape, x.dtype, joint is None)
        if form in self._by_form:
            return self._by_form[form]
        among = [lay_out(schedule) for schedule in self.candidates(bucket_of(x.shape)[0], joint)]
        sizes = [tuple(parameter.shape) for parameter in parameters()]
        wires = lossy_wires(group, x) if self.lossy else []
        laid_out = among[-1].sequence_parallel
        asked = repr((self.asked, self._num_blocks, sizes, laid_out, joint, self._may_be_off, *wires))
        key = cache_key(asked, bucket_of(x.shape), x.dtype, group)
        if key not in self:
            agree()
            self[key] = self._tuning(among, wires, group, key)
        self._by_form[form] = self[key]
        return self[key]

    def _tuning(
        self, schedules: Sequence[Schedule], wires: Sequence[str], group: ProcessGroup | None, key: str
    ) -> Tuning:
        among, exact = labelled(schedules, wires), len(schedules)
        fixed = self.resumed.get(key.split(".")[0])
        if fixed not in among and torch.are_deterministic_algorithms_enabled():
            fixed = fixed_among([*among][:exact])
        return Tuning(
            among, group, key, has_off=not schedules[0].overlaps, fixed=fixed, waves=waves_of(schedules, wires),
            exact=exact if wires else 0,
        )  # fmt: skip

    @property
    def choices(self) -> dict[str, str]:
        """Labels chosen, by the configuration of their key, for a later run that resumes this one."""
        chosen = {key.split(".")[0]: each.chosen for key, each in self.items() if each.chosen is not None}
        return self.resumed | chosen

    def begin_again(self) -> None:
        """Drop measurements and keep choices, after a failure: ranks may have counted different calls."""
        self.resumed = self.choices
        self.clear()
        self._by_form.clear()

    def copied(self) -> Tunings:
        """Tunings with the same choices for a copy of the stack, which may be of other ranks."""
        made = Tunings(
            self.asked, self._num_blocks, self._layer_of, may_be_off=self._may_be_off, lossy=self.lossy,
            only=self._only,
        )  # fmt: skip
        made.resumed = self.choices
        return made


def asked_for(schedule: str, sub_batches: SubBatchCount | None, recompute: Recompute) -> Asked:
    """Schedule and sub-batches that a stack is asked for. None: "auto" with schedule "auto", else 2.

    $OASES_SCHEDULE, such as oases or oases@4, replaces the schedule "auto". UsageError for an unknown one.
    """
    pinned = os.environ.get("OASES_SCHEDULE", "")
    if schedule == AUTO and pinned:
        schedule, _, count = pinned.partition("@")
        if schedule not in GENERATORS or not (count.isdecimal() or count == pinned[len(schedule) :]):
            raise UsageError(
                f"OASES_SCHEDULE={pinned!r} is no schedule; give NAME or NAME@SUB_BATCHES, where NAME is one of "
                f"{', '.join(GENERATORS)}"
            )
        sub_batches = int(count[:9]) if count else None if sub_batches == AUTO else sub_batches
    return schedule, (AUTO if schedule == AUTO else 2) if sub_batches is None else sub_batches, recompute


def waves_of(schedules: Sequence[Schedule], wires: Sequence[str] = ()) -> list[list[str]]:
    """Labels of schedules in waves, by sub-batches; those that do not overlap are in the first.

    A schedule with other wires is in its own wave.
    """
    first = min((each.num_sub_batches for each in schedules if each.overlaps), default=1)
    counts = sorted({max(first, each.num_sub_batches) for each in schedules})
    return [
        [*labelled([each for each in schedules if max(first, each.num_sub_batches) == count], wires)]
        for count in counts
    ]
