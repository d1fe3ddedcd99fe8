"""A timeline: which rank's compute and link did what, when. Measured and simulated ones are drawn alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Lane = Literal["compute", "link"]


@dataclass(frozen=True)
class Span:
    """One op of one rank; times in seconds from the beginning of the step. `waiting`: the compute stood still."""

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
        """Whether this is compute standing still for a collective."""
        return self.name.startswith("wait ")

    @property
    def kind(self) -> str:
        """What the span is, for colours and sums: forward, combine, recompute, backward, waiting, all-reduce."""
        if self.lane == "link":
            return "all-reduce"
        return _KINDS.get(self.name.split()[0], "other")


_KINDS = {
    "F": "forward",
    "C": "combine",
    "R": "recompute",
    "B": "backward",
    "W": "weight gradient",
    "wait": "waiting",
}


@dataclass(frozen=True)
class Timeline:
    """The spans of one step under one schedule, over all ranks."""

    name: str
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the first span's start (0) to the last one's end."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lanes(self) -> list[tuple[int, Lane]]:
        """(rank, lane) in drawing order."""
        ranks = sorted({span.rank for span in self.spans})
        lanes: tuple[Lane, Lane] = ("compute", "link")
        return [(rank, lane) for rank in ranks for lane in lanes]

    def busy(self, rank: int, lane: Lane) -> float:
        """Seconds in which the lane worked; waiting does not count."""
        return sum(s.seconds for s in self.spans if (s.rank, s.lane) == (rank, lane) and not s.waiting)

    def text(self, columns: int = 100) -> str:
        """The timeline in characters, one line a lane: the first letter of each op, '.' where compute waits."""
        width = max(len(f"rank {rank} {lane}") for rank, lane in self.lanes)
        lines = [f"{self.name}: {self.seconds * 1e3:.0f} ms"]
        for rank, lane in self.lanes:
            cells = [" "] * columns
            for span in self.spans:
                if (span.rank, span.lane) == (rank, lane):
                    first = round(span.start / self.seconds * columns)
                    last = max(first + 1, round(span.end / self.seconds * columns))
                    letter = "." if span.waiting else "=" if lane == "link" else span.name[0]
                    for cell in range(first, min(last, columns)):
                        cells[cell] = letter
            lines.append(f"{f'rank {rank} {lane}':<{width}} |{''.join(cells)}|")
        return "\n".join(lines)


def from_measurements(
    name: str,
    per_rank: Sequence[tuple[list[tuple[str, float, float]], list[tuple[str, float, float]]]],
) -> Timeline:
    """A timeline from each rank's (op, start, end) on the compute and (label, issued, finished) on the link.

    Times are of one clock. A link carries one collective after another, so a collective that was issued while
    the one before was still on the wire is drawn from the end of that one.
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
    """Chrome trace events, which Perfetto and chrome://tracing open: a process per schedule and rank."""
    events: list[dict[str, Any]] = []
    for index, timeline in enumerate(timelines):
        for rank, lane in timeline.lanes:
            process, thread = 1000 * index + rank, 0 if lane == "compute" else 1
            names = {"process_name": f"{timeline.name}, rank {rank}", "thread_name": lane}
            events += [
                {"ph": "M", "pid": process, "tid": thread, "name": key, "args": {"name": value}}
                for key, value in names.items()
            ]
        events += [
            {
                "ph": "X", "pid": 1000 * index + span.rank, "tid": 0 if span.lane == "compute" else 1,
                "name": span.name, "cat": span.kind, "ts": span.start * 1e6, "dur": span.seconds * 1e6,
            }
            for span in timeline.spans
        ]  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
