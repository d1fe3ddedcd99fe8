"""Timeline of each rank's compute and links, measured or simulated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

Lane: TypeAlias = str
"""Lane that a span occupies: "compute", or the name of a link."""


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one rank, in seconds from the start of the step. `waiting`: compute was idle."""

    rank: int
    lane: Lane
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end - self.start

    @property
    def waiting(self) -> bool:
        """Whether compute is idle, waiting for a collective or another stage's message."""
        return self.lane == "compute" and self.name.startswith(("wait ", "receive "))

    @property
    def bare_name(self) -> str:
        """Name of the op without its micro-batch and segment."""
        return _PREFIX.sub(r"\1", self.name, count=1)

    @property
    def kind(self) -> str:
        """Kind of the span for colours and sums, e.g. forward, recompute, waiting, bubble, all-reduce."""
        first = self.bare_name.split()[0]
        if self.lane == "compute":
            return _KINDS.get(first, "other")
        return _LINK_KINDS.get(first, "all-reduce")


_KINDS = {
    "F": "forward",
    "C": "combine",
    "R": "recompute",
    "B": "backward",
    "W": "weight gradient",
    "BC": "backward",
    "BF": "backward",
    "D": "forward",
    "RC": "recompute",
    "wait": "waiting",
    "receive": "bubble",
    "E": "experts",
    "P": "other",
    "RD": "recompute",
    "RE": "recompute",
    "BE": "experts",
    "embedding": "embedding and head",
    "head": "embedding and head",
    "optimizer": "optimizer",
}
_LINK_KINDS = {
    "send": "send", "gradients": "gradients", "reshard": "reshard", "parameters": "parameters",
    "all_to_all": "all-to-all", "share": "parameters", "join": "parameters", "split": "gradients",
    "return": "gradients",
}  # fmt: skip
_PREFIX = re.compile(r"(wait |receive )?(micro-batch \d+ )?(segment \d+ )?")
"""Prefix of a plan's ops: micro-batch and segment."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a rank holds from this time on."""

    rank: int
    time: float
    num_bytes: int


@dataclass(frozen=True)
class Timeline:
    """Spans of one step under one schedule, over all ranks. held: memory over time, if known.

    who: what a rank's number denotes, "rank" or "stage"; a pipeline shows one rank per stage.
    """

    name: str
    spans: tuple[Span, ...]
    held: tuple[Held, ...] = ()
    who: str = "rank"

    @cached_property
    def total_seconds(self) -> float:
        """Seconds from the first span's start (0) to the last one's end."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lanes(self) -> list[tuple[int, Lane]]:
        """(rank, lane) in drawing order."""
        lanes = {(span.rank, span.lane) for span in self.spans}
        ranks = {rank for rank, _ in lanes}
        every = lanes | {(rank, "compute") for rank in ranks}
        return sorted(every, key=lambda lane: (lane[0], lane[1] != "compute", lane[1]))

    def busy(self, rank: int, lane: Lane) -> float:
        """Seconds in which the lane was busy; waiting does not count."""
        return sum(s.seconds for s in self.spans if (s.rank, s.lane) == (rank, lane) and not s.waiting)

    def exposed(self, rank: int) -> float:
        """Seconds of exposed communication: compute waited for a collective."""
        return self._stood_still(rank, "wait ")

    def bubble(self, rank: int) -> float:
        """Seconds of pipeline bubble: compute waited for a message or had finished."""
        ends = [span.end for span in self._by_rank.get(rank, []) if span.lane == "compute"]
        return self._stood_still(rank, "receive ") + self.total_seconds - max(ends, default=0.0)

    def peak_bytes(self, rank: int) -> int:
        """Peak bytes of the rank; 0 if its memory is unknown."""
        return max((held.num_bytes for held in self.held if held.rank == rank), default=0)

    def _stood_still(self, rank: int, how: str) -> float:
        spans = self._by_rank.get(rank, [])
        return sum(span.seconds for span in spans if span.lane == "compute" and span.name.startswith(how))

    @cached_property
    def _by_rank(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.rank, []).append(span)
        return found

    def text(self, columns: int = 100, *, links: bool = True) -> str:
        """Render as text, one line per lane: the first letter of each op, '.' for waiting compute.

        links: include the lanes of links.
        """
        lanes = [(rank, lane) for rank, lane in self.lanes if links or lane == "compute"]
        width = max(len(f"{self.who} {rank} {lane}") for rank, lane in lanes)
        lines = [f"{self.name}: {self.total_seconds * 1e3:.0f} ms"]
        scale = columns / self.total_seconds if self.total_seconds else 0.0
        for rank, lane in lanes:
            cells = [" "] * columns
            for span in self.spans:
                if (span.rank, span.lane) == (rank, lane):
                    first = round(span.start * scale)
                    last = max(first + 1, round(span.end * scale))
                    letter = "." if span.waiting else "=" if lane != "compute" else span.bare_name[0]
                    for cell in range(first, min(last, columns)):
                        cells[cell] = letter
            lines.append(f"{f'{self.who} {rank} {lane}':<{width}} |{''.join(cells)}|")
        return "\n".join(lines)


def from_measurements(
    name: str,
    per_rank: Sequence[tuple[list[tuple[str, float, float]], list[tuple[str, float, float]]]],
) -> Timeline:
    """Build a timeline from each rank's (op, start, end) on the compute and (label, issued, finished) on the link.

    Times are of one clock. A link carries one collective at a time, so a collective issued while the previous one
    was in flight is drawn from the end of that one.
    """
    begin = min(start for compute, link in per_rank for _, start, _ in compute + link)
    spans = []
    for rank, (compute, link) in enumerate(per_rank):
        spans += [Span(rank, "compute", op, start - begin, end - begin) for op, start, end in compute]
        free = begin
        for label, issued, finished in sorted(link, key=lambda item: item[1]):
            spans.append(Span(rank, "link", f"all_reduce {label}", max(issued, free) - begin, finished - begin))
            free = max(free, finished)
    return Timeline(name, tuple(spans))


def trace_json(timelines: Iterable[Timeline]) -> str:
    """Chrome trace events for Perfetto and chrome://tracing: one process per schedule and rank."""
    events: list[dict[str, Any]] = []
    for index, timeline in enumerate(timelines):
        threads = {lane: number for number, lane in enumerate(dict.fromkeys(lane for _, lane in timeline.lanes))}
        for rank, lane in timeline.lanes:
            process, thread = 100_000 * index + rank, threads[lane]
            names = {"process_name": f"{timeline.name}, {timeline.who} {rank}", "thread_name": lane}
            events += [
                {"ph": "M", "pid": process, "tid": thread, "name": key, "args": {"name": value}}
                for key, value in names.items()
            ]
        events += [
            {
                "ph": "X", "pid": 100_000 * index + span.rank, "tid": threads[span.lane],
                "name": span.name, "cat": span.kind, "ts": span.start * 1e6, "dur": span.seconds * 1e6,
            }
            for span in timeline.spans
        ]  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
