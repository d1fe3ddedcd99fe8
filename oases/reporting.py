"""Overlap report: hidden and exposed communication, from the tickets of all collectives of this process.

`oases.report()` shows whether overlap is on. Per stack and layer it gives the collectives, their bytes, the seconds
the link was busy, the seconds the compute waited for it, and hidden = 1 - waited / busy. Further sections cover
other senders, such as reducers of sparse gradients.
"""

from __future__ import annotations

import itertools
import re
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from oases.execution.group import scheduler_of
from oases.extension import build_text


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


def sections_of(ranks: tuple[int, ...]) -> list[Section]:
    """Sections of all owners among these ranks, in order of registration."""
    found = [owner.section() for owner in _owners.values() if owner.ranks == ranks]
    return [section for section in found if section is not None]


WHOLE_BATCH = ", whole batch"
"""Suffix of a stack's label for batches too small for its sub-batches, which run whole."""
_OP = re.compile(
    r"(?P<kind>F|C|R|RC|BC|B) (?P<block>\d+)\.\d+ \((?P<stack>stack (?P<number>\d+)[^,]*)"
    rf"(?P<whole>{WHOLE_BATCH})?, (layer (?P<layer>\d+), )?"
)


@dataclass
class Row:
    """Sums over one group of collectives; seconds and bytes of this rank."""

    where: str
    collectives: int = 0
    bytes: int = 0
    link_seconds: float = 0.0
    blocked_seconds: float = 0.0

    @property
    def hidden(self) -> float | None:
        """Fraction of the link's time under compute; None if nothing was sent."""
        if not self.link_seconds:
            return None
        return max(0.0, 1.0 - self.blocked_seconds / self.link_seconds)

    def add(self, totals: Any) -> None:
        """Add the totals of one label."""
        self.collectives += totals.count
        self.bytes += totals.bytes
        self.link_seconds += totals.link_seconds
        self.blocked_seconds += totals.blocked_seconds


@dataclass(frozen=True)
class Report:
    """Result of `oases.report()`; prints as a table, followed by the build of the extension.

    stacks: one row each, and another for batches too small for its sub-batches, which ran whole. others:
    collectives outside of stack schedules. sections: other senders, such as `S2Reducer`.
    """

    stacks: list[Row]
    layers: list[Row]
    others: list[Row]
    sections: list[Section] = field(default_factory=list)

    @property
    def hidden(self) -> float | None:
        """Hidden fraction over all stacks and layers; None if nothing was sent."""
        total = Row("total")
        for row in self.stacks + self.others:
            total.link_seconds += row.link_seconds
            total.blocked_seconds += row.blocked_seconds
        return total.hidden

    @property
    def overlapping(self) -> bool:
        """Whether any communication ran under compute."""
        return bool(self.hidden)

    def json(self) -> dict[str, Any]:
        """The rows as plain data."""
        rows: dict[str, Any] = {
            name: [asdict(row) | {"hidden": row.hidden} for row in rows]
            for name, rows in (("stacks", self.stacks), ("layers", self.layers), ("others", self.others))
        }
        return rows | {"sections": [{"title": one.title} | one.json() for one in self.sections]}

    def __str__(self) -> str:
        below = [f"{one.title}\n{one}" for one in self.sections] + [f"built with {build_text()}"]
        if not self.stacks + self.others:
            none = "no collective was waited for: overlap is off (a group of one rank, or no step yet)"
            return "\n".join([none, *below])
        lines = [f"{'where':<32}{'collectives':>12}{'MB':>10}{'link s':>9}{'waited s':>10}{'hidden':>8}"]
        for row in self.stacks + self.layers + self.others:
            hidden = "-" if row.hidden is None else f"{100 * row.hidden:.0f} %"
            lines.append(
                f"{row.where:<32}{row.collectives:>12}{row.bytes / 1e6:>10.1f}{row.link_seconds:>9.3f}"
                f"{row.blocked_seconds:>10.3f}{hidden:>8}"
            )
        return "\n".join([*lines, *below])


def names_op(label: str) -> bool:
    """Whether a ticket's label is of an op of a stack's schedule."""
    return _OP.match(label) is not None


def report(process_group: dist.ProcessGroup | None = None) -> Report:
    """Report of a group's collectives on this rank so far (None: the default group): cost and hidden fraction."""
    if process_group is None:
        if not dist.is_initialized():
            return Report([], [], [], sections_of(()))
        process_group = dist.group.WORLD
        assert process_group is not None
    stacks: dict[tuple[int, str], Row] = {}
    layers: dict[tuple[int, int], Row] = {}
    others: dict[str, Row] = {}
    for label, totals in scheduler_of(process_group).totals().items():
        match = _OP.match(label)
        if match is None:
            others.setdefault(label, Row(label)).add(totals)
            continue
        stack, number = match["stack"], int(match["number"])
        layer = int(match["block"]) // 2 if match["layer"] is None else int(match["layer"])
        calls = stack + (match["whole"] or "")
        stacks.setdefault((number, calls), Row(calls)).add(totals)
        layers.setdefault((number, layer), Row(f"  {stack} layer {layer}")).add(totals)
    # By number: the totals are in the order of their labels, in which stack 10 precedes stack 9.
    by_stack = [row for _, row in sorted(stacks.items())]
    by_layer = [row for _, row in sorted(layers.items())]
    sections = sections_of(tuple(dist.get_process_group_ranks(process_group)))
    return Report(by_stack, by_layer, list(others.values()), sections)
