"""Measured schedules of a stack: candidates, and what was chosen for each kind of input."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oases.core.dtypes import LOSSY, QUANTISED, WIRE_BYTES
from oases.core.execution.autotune import Autotune, Budget, cache_key, fixed_among
from oases.core.execution.communication import WireType, carries_codes, wire_type
from oases.core.execution.group import ProcessGroup, all_gather_objects
from oases.core.schedule import AUTO, GENERATORS, LayerOf, Recompute, Schedule, along_sequence, generate
from oases.errors import UsageError

_SUB_BATCHES = (2, 4, 8)
_PENDING = "@"
"""Mark of turns in place of a label among choices: the run that is resumed had not chosen yet."""

SubBatchCount = int | Literal["auto"]
Asked = tuple[str, SubBatchCount, Recompute]
"""Schedule, sub_batches and recompute of a stack."""


class Choice(NamedTuple):
    """Candidate of a stack. wire: type of its sums; None for their own."""

    schedule: Schedule
    wire: WireType | None = None


Tuning = Autotune[Choice]


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
    return [name for name in LOSSY if WIRE_BYTES[name] < x.dtype.itemsize and (name != QUANTISED or quantised)]


def label(schedule: Schedule) -> str:
    """Label of a schedule in the cache."""
    return f"{schedule.name} {schedule.num_sub_batches}"


def bucket_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Shapes that share a choice: batch rounded down, other dimensions but the last rounded up to powers of two."""
    batch = 1 << max(shape[0], 1).bit_length() - 1
    return batch, *(1 << (size - 1).bit_length() for size in shape[1:-1]), *shape[1:][-1:]


class Tunings(dict[str, Tuning]):
    """Tunings of one stack by key, and what it was asked for.

    asked: schedule, sub_batches and recomputation; either of the first two is "auto", unless `only` is the schedule,
    and wires alone are measured. place: name of the stack, and its first block's number in the model. may_be_off:
    whether "off" is a candidate where others are. lossy: measure wires other than the type of the sums.
    """

    def __init__(
        self, asked: Asked, num_blocks: int, layer_of: LayerOf, place: tuple[str, int] = ("", 0), *, may_be_off: bool,
        lossy: bool = False, only: Schedule | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.asked, self._num_blocks, self._layer_of, self._may_be_off = asked, num_blocks, layer_of, may_be_off
        self.lossy, self._only, self._place = lossy, only, place
        self.resumed: dict[str, str] = {}
        """Choices of a run that this one resumes (`choices`); they are not measured again."""
        self._budget = Budget()
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
        together: bool = False,
    ) -> Tuning:  # fmt: skip
        """Tuning for inputs like `x`. parameters: of the blocks. lay_out: makes a schedule that the stack can run.
        agree: called for new shapes, raises where the ranks' differ; what follows is a collective. together: whether
        the group's ranks have inputs of several batches and lengths; then all shapes share one choice.

        Nothing is measured where the run that is resumed chose, or torch is to be deterministic.
        """
        form: tuple[object, ...] = () if together else (bucket_of(x.shape), x.dtype, joint)
        if form in self._by_form:
            return self._by_form[form]
        batch, *others = bucket_of(x.shape)
        if together:
            batch, others, joint = _least(batch, group), [*x.shape[-1:]], None
        among = [lay_out(schedule) for schedule in self.candidates(batch, joint)]
        sizes = [tuple(parameter.shape) for parameter in parameters()]
        wires = lossy_wires(group, x) if self.lossy else []
        laid_out = among[-1].sequence_parallel
        asked = repr((self._place, self.asked, self._num_blocks, sizes, laid_out, joint, self._may_be_off, *wires))
        key = cache_key(asked, (batch, *others), x.dtype, group)
        if key not in self:
            agree()
            self[key] = self._tuning(among, wires, group, key)
        self._by_form[form] = self[key]
        return self[key]

    def _tuning(
        self, schedules: Sequence[Schedule], wires: Sequence[str], group: ProcessGroup | None, key: str
    ) -> Tuning:
        among, exact = labelled(schedules, wires), len(schedules)
        fixed = self.resumed.get(key.split(".")[0], "")
        turns = fixed.removeprefix(_PENDING) if fixed.startswith(_PENDING) else ""
        if fixed not in among and torch.are_deterministic_algorithms_enabled():
            fixed = fixed_among([*among][:exact])
        return Tuning(
            among, group, key, has_off=not schedules[0].overlaps, fixed=fixed, resumed=turns,
            waves=waves_of(schedules, wires), exact=exact if wires else 0, budget=self._budget,
        )  # fmt: skip

    @property
    def choices(self) -> dict[str, str]:
        """Labels chosen, by the configuration of their key, for a later run that resumes this one.

        "@" and the turns so far where none is chosen yet.
        """
        return self.resumed | {key.split(".")[0]: each.chosen or _PENDING + each.turns for key, each in self.items()}

    def copied(self) -> Tunings:
        """Tunings with the same choices for a copy of the stack, which may be of other ranks."""
        made = Tunings(
            self.asked, self._num_blocks, self._layer_of, self._place, may_be_off=self._may_be_off, lossy=self.lossy,
            only=self._only,
        )  # fmt: skip
        made.resumed = self.choices
        return made


def _least(batch: int, group: ProcessGroup | None) -> int:
    """Smallest batch of the ranks."""
    return min(all_gather_objects(batch, group))


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
