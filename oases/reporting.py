"""Overlap report: hidden and exposed communication, from the tickets of all collectives of this process.

`oases.report()` shows whether overlap is on. Per stack, layer, collective and pass it gives their number and bytes,
and the seconds in which the link was busy, the compute waited (exposed), and the link was busy under compute
(hidden). Further sections cover other senders, such as reducers of sparse gradients.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from oases.core.execution.executor import AT_ONCE, WHOLE_BATCH
from oases.core.execution.group import scheduler_of
from oases.extension import OverlapScheduler, QuantizedBackend, build_text


class Section(Protocol):
    """Section of one owner; prints as a table. title: the line above it."""

    title: str

    def json(self) -> dict[str, Any]:
        """The section as plain data."""


class Owner(Protocol):
    """Object that counts what it sends. ranks: global ranks of its group; () without a group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of its group."""

    def section(self) -> Section | None:
        """Its counts; None before there are any."""


_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # in order of registration


def register(owner: Owner) -> None:
    """Include an owner in reports as long as it lives; only a weak reference is kept."""
    _owners[next(_numbers)] = owner


def sections_of(ranks: tuple[int, ...] | None) -> list[Section]:
    """Sections of all owners, or of those among these ranks, in order of registration."""
    found = [owner.section() for owner in _owners.values() if ranks is None or owner.ranks == ranks]
    return [section for section in found if section is not None]


_OP = re.compile(
    r"(?P<kind>F|C|D|E|R|RC|BC|BF|BE|B) (?P<block>\d+)\.\d+ \((?P<stack>stack (?P<number>\d+)[^,]*)"
    rf"(?P<whole>{WHOLE_BATCH})?, (layer (?P<layer>\d+), )?"
)


@dataclass
class Row:
    """Sums over one group of collectives; seconds and bytes of this rank.

    blocked_seconds: exposed: the compute waited. saved_bytes: by quantisation. error_samples, error_sum: sums that
    were compared, and their relative errors.
    """

    where: str
    collectives: int = 0
    bytes: int = 0
    link_seconds: float = 0.0
    blocked_seconds: float = 0.0
    saved_bytes: int = 0
    error_samples: int = 0
    error_sum: float = 0.0

    @property
    def relative_error(self) -> float | None:
        """Mean relative error of the sampled sums; None without samples."""
        return self.error_sum / self.error_samples if self.error_samples else None

    @property
    def hidden_seconds(self) -> float:
        """Link time under compute."""
        return max(0.0, self.link_seconds - self.blocked_seconds)

    @property
    def hidden(self) -> float | None:
        """Fraction of the link's time under compute; None if nothing was sent."""
        if not self.link_seconds:
            return None
        return max(0.0, 1.0 - self.blocked_seconds / self.link_seconds)

    def add(self, totals: Any, errors: tuple[int, float], *, at_once: bool = False) -> None:
        """Add the totals of one label, and the number and sum of its sampled errors.

        at_once: the schedule waits for it before any compute. Then all of its time is exposed: that the host is slow
        to begin the wait, or accumulates gradients before it, is no overlap.
        """
        self.collectives += totals.count
        self.bytes += totals.bytes
        self.link_seconds += totals.link_seconds
        self.blocked_seconds += max(totals.blocked_seconds, totals.link_seconds * at_once)
        self.saved_bytes += totals.saved_bytes
        self.error_samples += errors[0]
        self.error_sum += errors[1]


def _hidden(rows: list[Row]) -> float | None:
    link, blocked = (sum(getattr(row, name) for row in rows) for name in ("link_seconds", "blocked_seconds"))
    return Row("", link_seconds=link, blocked_seconds=blocked).hidden


@dataclass(frozen=True)
class Report:
    """Result of `oases.report()`; prints as a table, followed by the build of the extension.

    stacks: one row each, and another for batches too small for its sub-batches, which ran whole. layers, passes: the
    same by layer, and by collective and pass: forward, recompute or backward. collectives: by all three. others:
    collectives outside of stack schedules. sections: other senders, such as `S2Reducer`. exempted: what is sent in
    bfloat16 because its quantised sums were too wrong, an op of a layer or a label of others, with the last relative
    error.
    """

    stacks: list[Row]
    layers: list[Row]
    others: list[Row]
    sections: list[Section] = field(default_factory=list)
    passes: list[Row] = field(default_factory=list)
    collectives: list[Row] = field(default_factory=list)
    exempted: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float | None:
        """Hidden fraction over all stacks and layers; None if nothing was sent."""
        return _hidden(self.stacks + self.others)

    @property
    def overlapping(self) -> bool:
        """Whether communication ran under compute: a percent of that of stacks, or of all where there is no stack."""
        return (_hidden(self.stacks or self.others) or 0.0) >= 0.01

    def json(self) -> dict[str, Any]:
        """The rows as plain data."""
        rows: dict[str, Any] = {
            name: [
                asdict(row)
                | {"hidden_seconds": row.hidden_seconds, "hidden": row.hidden, "relative_error": row.relative_error}
                for row in rows
            ]
            for name, rows in (
                ("stacks", self.stacks), ("passes", self.passes), ("layers", self.layers),
                ("collectives", self.collectives), ("others", self.others),
            )
        }  # fmt: skip
        rows["exempted"] = self.exempted
        return rows | {"sections": [{"title": one.title} | one.json() for one in self.sections]}

    def __str__(self) -> str:
        below = [f"{one.title}\n{one}" for one in self.sections] + [f"built with {build_text()}"]
        if not self.stacks + self.others:
            none = "no collective was waited for: overlap is off (a group of one rank, or no step yet)"
            return "\n".join([none, *below])
        rows = self.stacks + self.passes + self.layers + self.collectives + self.others
        lossy = any(row.saved_bytes for row in rows)
        lines = [
            f"{'where':<44}{'collectives':>12}{'MB':>10}{'link s':>9}{'exposed s':>10}{'hidden s':>10}{'hidden':>8}"
        ]
        lines[0] += f"{'saved MB':>10}{'error':>9}" if lossy else ""
        for row in rows:
            hidden = "-" if row.hidden is None else f"{100 * row.hidden:.0f} %"
            lines.append(
                f"{row.where:<44}{row.collectives:>12}{row.bytes / 1e6:>10.1f}{row.link_seconds:>9.3f}"
                f"{row.blocked_seconds:>10.3f}{row.hidden_seconds:>10.3f}{hidden:>8}"
            )
            if lossy:
                error = "-" if row.relative_error is None else f"{row.relative_error:.1e}"
                lines[-1] += f"{row.saved_bytes / 1e6:>10.1f}{error:>9}"
        lines += [
            f"{where}: sent in bfloat16, since its relative error stayed above {QuantizedBackend.largest_error}"
            f" ({error:.1e})"
            for where, error in self.exempted.items()
        ]
        return "\n".join([*lines, *below])


class _Place(NamedTuple):
    """Place of a stack's collective, from its label. calls: the stack's calls, those of whole batches apart."""

    number: int
    stack: str
    calls: str
    layer: int
    which: int
    """Index of its pass in _PASSES."""


_PASSES = ("forward", "recompute", "backward")
_PASS_OF = {"F": 0, "C": 0, "D": 0, "E": 0, "R": 1, "RC": 1, "B": 2, "BC": 2, "BF": 2, "BE": 2}


@functools.lru_cache(maxsize=1 << 16)
def _place_of(label: str) -> _Place | None:
    """Place of a ticket's label; None unless it is of an op of a stack's schedule."""
    match = _OP.match(label)
    if match is None:
        return None
    stack, layer = match["stack"], match["layer"]
    return _Place(
        int(match["number"]), stack, stack + (match["whole"] or ""),
        int(match["block"]) // 2 if layer is None else int(layer), _PASS_OF[match["kind"]],
    )  # fmt: skip


def names_op(label: str) -> bool:
    """Whether a ticket's label is of an op of a stack's schedule."""
    return _place_of(label) is not None


def report(process_group: dist.ProcessGroup | None = None) -> Report:
    """Report of collectives on this rank so far: cost and hidden fraction.

    process_group: whose collectives; None for those of all groups of this process that exist.
    """
    if not dist.is_initialized():
        return Report([], [], [], sections_of(()))
    rows: list[dict[Any, Row]] = [{}, {}, {}, {}]
    others: dict[str, Row] = {}
    schedulers = [*OverlapScheduler.all().values()] if process_group is None else [scheduler_of(process_group)]
    found = [
        (label, totals, errors.get(label, (0, 0.0)))
        for scheduler in schedulers
        for errors in (scheduler.errors(),)
        for label, totals in scheduler.totals().items()
    ]
    for label, totals, error in found:
        place = _place_of(label)
        if place is None:
            others.setdefault(label, Row(label)).add(totals, error)
            continue
        number, stack, calls, layer, which = place
        sent = f"{totals.collective} {_PASSES[which]}"
        # By number: the totals are in the order of their labels, in which stack 10 precedes stack 9.
        for group, key, where in zip(
            rows,
            ((number, calls), (number, which, sent), (number, layer), (number, layer, which, sent)),
            (calls, f"  {stack} {sent}", f"  {stack} layer {layer}", f"  {stack} layer {layer} {sent}"),
            strict=True,
        ):
            group.setdefault(key, Row(where)).add(totals, error, at_once=label.endswith(f"{AT_ONCE})"))
    stacks, passes, layers, collectives = ([row for _, row in sorted(each.items())] for each in rows)
    sections = sections_of(None if process_group is None else tuple(dist.get_process_group_ranks(process_group)))
    exempted = {where: error for scheduler in schedulers for where, error in scheduler.exempted().items()}
    return Report(stacks, layers, list(others.values()), sections, passes, collectives, exempted)


Seconds = dict[str, float]
"""exposed_seconds and hidden_seconds."""


class StepOverlap:
    """Exposed and hidden time of one step after another, from reports of all steps so far.

    report: of this rank's collectives so far.
    """

    def __init__(self, report: Callable[[], Report]) -> None:
        self._report = report
        self._seen: dict[str, Row] = {}
        self.take()

    def take(self) -> dict[str, Seconds]:
        """Seconds since the last call, by the place of a row: stack, layer, collective and pass."""
        found = self._report()
        now = {row.where.strip(): row for row in found.stacks + found.passes + found.layers + found.collectives}
        before, self._seen = self._seen, now
        seconds: dict[str, Seconds] = {}
        for where, row in now.items():
            past = before.get(where, Row(where))
            if row.collectives > past.collectives:
                link = row.link_seconds - past.link_seconds
                exposed = row.blocked_seconds - past.blocked_seconds
                seconds[where] = {"exposed_seconds": exposed, "hidden_seconds": max(0.0, link - exposed)}
        return seconds
